"""ray.util.collective on ringcomm: four actors on one node and on two, against the results of Ray's Gloo backend."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray")

PROGRAM = Path(__file__).with_name("programs") / "ray_actors.py"
LIMIT = 150  # seconds; most of them for Ray's own start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 20)]

REFUSED = [
    "ArgumentError: tensor_list[0]: expected float64 of shape (3,), got float64 of shape (2,)",
    "ArgumentError: tensor: expected float64 of shape (2,), got float64 of shape (3,)",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a function that returns what the ranks have got, of one group after another."""

    def found(*arguments):
        file = tmp_path_factory.mktemp("ray") / "results.json"
        command = [sys.executable, PROGRAM, *arguments, file]
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # for sockets, whose names must be short
            env = {**os.environ, "RAY_TMPDIR": folder}
            # Actors import also from the folder of the driver, where ringcomm may lie without its core.
            ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=folder, env=env)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return json.loads(file.read_text())

    return found


@pytest.fixture(scope="module")
def on_gloo(results):
    return results("GLOO", "1", "created")


@pytest.mark.parametrize(("nodes", "how"), [("1", "created"), ("2", "declared")])
def test_actors_get_what_they_get_on_gloo(results, on_gloo, nodes, how):
    *found, lost = results("RINGCOMM", nodes, how)
    assert [text.partition(" ")[0] for text in lost] == ["PeerLost:"] * 3
    assert all("rank 3" in text for text in lost)
    assert found[0::2] == on_gloo
    for ranks in found[1::2]:
        for *refused, strided, total in ranks:
            assert refused == REFUSED
            assert strided.startswith("ArgumentError: ")
            assert "contiguous" in strided
            assert total == [4.0, 4.0]
