"""`ringcomm run --respawn`: lost ranks are started again, and join those that went on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, signal, sys, time
import numpy as np
import ringcomm

kills = json.loads(sys.argv[1])  # [rank, restarts, step]
rank, restarts = (int(os.environ[f"RINGCOMM_{name}"]) for name in ("RANK", "RESTARTS"))
comm, step, sizes = ringcomm.init(), 0, []
while step < 30:
    try:
        step = int(comm.all_reduce(np.array([step]), "max")[0])
        x = comm.all_reduce(np.ones(100_000))
        assert (x == comm.size).all()
        if [rank, restarts, step] in kills:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
        step += 1
        sizes.append(comm.size)
    except (ringcomm.PeerLost, ringcomm.Aborted):
        comm = comm.shrink(timeout=10)
        comm = comm.grow(timeout=float(sys.argv[2]))
print(json.dumps([rank, restarts, comm.rank, comm.size, len(sizes), sizes[-1]]))
"""


def run(tmp_path, kills, respawn, wait=10.0, ranks=3):
    """Return what each rank printed, by rank; and what the launcher wrote."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "ringcomm", "run", "-n", str(ranks), "--respawn", str(respawn)]
    command += [str(tmp_path / "program.py"), json.dumps(kills), str(wait)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = [json.loads(line.partition(" ")[2]) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, ended.stderr
    return {rank: rest for rank, *rest in lines}, ended.stderr


@pytest.mark.parametrize("victim", [0, 2])
def test_a_lost_rank_comes_back_in_its_place(tmp_path, victim):
    found, text = run(tmp_path, [[victim, 0, 10]], 1)
    assert {rank: rest[:3] for rank, rest in found.items()} == {r: [int(r == victim), r, 3] for r in range(3)}
    assert {rest[3] for rank, rest in found.items() if rank != victim} == {30}
    assert found[victim][3] == 20
    assert f"rank {victim} was killed by SIGKILL; started again (1 of 1)" in text


def test_ranks_are_lost_again_and_again(tmp_path):
    kills = [[1, 0, 5], [2, 0, 5], [1, 1, 9], [0, 0, 12], [1, 2, 20]]
    found, text = run(tmp_path, kills, 3)
    assert {rank: rest[:3] for rank, rest in found.items()} == {0: [1, 0, 3], 1: [3, 1, 3], 2: [1, 2, 3]}
    assert text.count("started again") == 5


def test_without_respawn_left_the_others_go_on_alone(tmp_path):
    found, text = run(tmp_path, [[1, 0, 5]], 0, wait=0.2)
    assert found == {0: [0, 0, 2, 30, 2], 2: [0, 1, 2, 30, 2]}
    assert "rank 1 was killed by SIGKILL; the others go on without it" in text


def test_a_rank_that_comes_back_too_late_ends(tmp_path):
    (tmp_path / "program.py").write_text(
        "import os, time, ringcomm\nif os.environ['RINGCOMM_RESTARTS'] == '1': time.sleep(1)\ncomm = ringcomm.init()\n"
        "if comm.rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(0.5)\n"
    )
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "2", "--respawn", "3", str(tmp_path / "program.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    assert "PeerLost: rank 1 was started again, but no rank is left that it could join" in ended.stderr
    assert ended.stderr.count("started again (") == 1


def test_ranks_that_fail_before_they_are_connected_end_the_job(tmp_path):
    (tmp_path / "program.py").write_text("import ringcomm\nringcomm.init().close()\n1 / 0\n")
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "2", "--respawn", "1000", str(tmp_path / "program.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "exited with status 1" in ended.stderr
    assert "started again" not in ended.stderr


def test_respawn_is_for_one_node():
    command = [
        sys.executable,
        "-m",
        "ringcomm",
        "run",
        "-n",
        "2",
        "--respawn",
        "1",
        "--nnodes",
        "2",
        "--node-rank",
        "0",
    ]
    command += ["--master-addr", "localhost", "--master-port", "1", "program.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "--respawn works on one node" in ended.stderr


@pytest.mark.parametrize("kills", [12, pytest.param(1000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)])])
def test_random_kills_lose_nothing(kills, tmp_path):
    program = Path(__file__).with_name("mortal.py")
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "4", "--respawn", str(kills), str(program)]
    ended = subprocess.run(
        [*command, str(kills), "1", str(tmp_path)], capture_output=True, text=True, timeout=60 + 5 * kills
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stderr.count("started again") == kills
    assert len(ended.stdout.splitlines()) == 4
