"""docs/ tells the truth: the layers it draws, the files it names, the numbers it states."""

import contextlib
import io
import re
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

import harness
import torch_world
from failures import raised
from ringcomm import MismatchError
from test_layers import LAYERS

ROOT = Path(__file__).parent.parent
DOCS = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}


def test_the_drawing_of_the_layers_is_what_the_test_of_imports_enforces():
    drawing = re.search(r"## Layers.*?```\n(.*?)```", DOCS["architecture.md"], re.DOTALL)[1]
    rows = [re.split(r" {2,}", line) for line in drawing.splitlines()]
    assert [set(re.findall(r"\w+", names)) for _, names, _ in rows] == [set(layer) for layer in LAYERS]


@pytest.mark.parametrize("name", DOCS)
def test_every_file_that_is_named_exists(name):
    for path in re.findall(r"`([\w/]+(?:/|\.(?:py|cpp|h|md)))`", DOCS[name]):
        places = [ROOT / folder / path for folder in (".", "docs", "ringcomm", "ringcomm/parallel", "bindings/include")]
        assert any(place.exists() for place in places), path


def call_often(comm):
    for _ in range(1100):
        comm.barrier()
    return [line.count("barrier()") for line in comm._transport.report(2000).splitlines()]


def test_the_flight_record_holds_as_many_calls_as_the_docs_say():
    assert all("last 1,023 calls of" in DOCS[name] for name in ("architecture.md", "errors.md"))
    assert harness.run(call_often, 1, world="threads") == [[1023]]


def send_too_little(comm, size):
    x = np.zeros(size, np.uint8)
    if comm.rank == 0:
        comm.send(x, peer=1)
    else:
        raised(MismatchError, lambda: comm.recv(x[:-1], peer=0))
    comm.barrier()


def test_a_sender_learns_of_a_refusal_from_the_size_on_that_the_docs_say():
    assert "at most 128 KiB" in DOCS["errors.md"]
    harness.run(send_too_little, 2, 128 << 10, world="threads")
    with pytest.raises(MismatchError):
        harness.run(send_too_little, 2, (128 << 10) + 64, world="threads")


def printed(code):
    import torch.distributed as dist

    out = io.StringIO()
    there = patch.multiple(dist, init_process_group=lambda _: None, destroy_process_group=lambda: None)
    with there, contextlib.redirect_stdout(out):
        exec(code, {"__name__": "__main__"})
    return out.getvalue()


def test_the_training_step_prints_what_the_docs_say():
    code, text = (re.search(rf"```{kind}\n(.*?)```", DOCS["parallel.md"], re.DOTALL)[1] for kind in ("python", "text"))
    assert torch_world.run(printed, 4, code) == [text, "", "", ""]


def test_the_model_of_ones_own_trains_and_is_kept(tmp_path):
    code = re.findall(r"```python\n(.*?)```", DOCS["parallel.md"], re.DOTALL)[1]
    code = code.replace('"checkpoint"', repr(str(tmp_path / "checkpoint")))
    expected = "the loss of the last step is less than that of the first\n"
    assert torch_world.run(printed, 4, code) == [expected, "", "", ""]
    assert (tmp_path / "checkpoint" / ".metadata").is_file()
