"""docs/ is true: the layers it draws, the files it names, the numbers it states."""

import contextlib
import dataclasses
import io
import re
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from test_layers import LAYERS

import harness
from harness import torch_world
from harness.failures import raised
from ringcomm import Config, MismatchError
from ringcomm.config import DUMP, JOB_SECRET, LAUNCHER, PREFIX, TORCH_DEFAULT, TRACE, TUNING

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "ringcomm", "ringcomm/parallel", "ringcomm/transports", "bindings/include")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
DOCS = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
PROSE = {name: " ".join(text.split()) for name, text in DOCS.items()}


def test_no_file_has_the_marks_of_a_merge():
    folders = ("docs", "ringcomm", "bindings", "kernels", "tests", "benchmarks", "examples")
    files = [*ROOT.glob("*.*"), *(file for folder in folders for file in (ROOT / folder).rglob("*.*"))]
    marked = re.compile(rb"^(<{7}|>{7}) ", re.MULTILINE)
    assert [file for file in files if file.is_file() and marked.search(file.read_bytes())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_is_filled_to_120_characters(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith(("|", "!["))] == []


def test_the_drawing_of_the_layers_is_what_the_test_of_imports_enforces():
    drawing = re.search(r"## Layers.*?```\n(.*?)```", DOCS["architecture.md"], re.DOTALL)[1]
    rows = [re.split(r" {2,}", line) for line in drawing.splitlines()]
    assert [set(re.findall(r"\w+", names)) for _, names, _ in rows] == [set(layer) for layer in LAYERS]


def test_no_term_is_defined_twice():
    section = re.search(r"## Words\n(.*?)\n## ", DOCS["architecture.md"], re.DOTALL)[1]
    terms = Counter(term for row in re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE) for term in row.split(", "))
    assert [term for term, count in terms.items() if count > 1] == []


def test_the_table_of_folders_is_complete_and_the_picture_names_some_of_them():
    section = re.search(r"## Folders\n(.*?)\n## ", DOCS["architecture.md"], re.DOTALL)[1]
    picture = re.search(r"```\n(.*?)```", section, re.DOTALL)[1]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    table = {name for row in rows for name in re.findall(r"`([\w/]+/)`", row)}
    for parent in ("ringcomm", "bindings/src", "kernels"):
        folders = [path for path in (ROOT / parent).iterdir() if path.is_dir() and path.name != "__pycache__"]
        assert {f"{parent}/{path.name}/" for path in folders} <= table
    for name in re.findall(r"[\w/]+/(?!\w)", picture):
        assert {name, f"ringcomm/{name}", f"bindings/src/{name}"} & table, name


@pytest.mark.parametrize("name", DOCS)
def test_every_named_file_exists(name):
    for path in re.findall(r"`([\w/]+(?:/|\.(?:py|cpp|h|md)))`", DOCS[name]):
        places = [ROOT / folder / path for folder in FOLDERS]
        assert any(place.exists() for place in places), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in headings(file), f"{target}#{anchor}"


def headings(page):
    """Return the anchors of a page, as GitHub and MyST form them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_documented_variable_exists():
    own = {PREFIX + field.name.upper() for field in dataclasses.fields(Config)}
    known = {*LAUNCHER, JOB_SECRET, TUNING, TRACE, DUMP, TORCH_DEFAULT, *own}
    for page in PAGES:
        variables = set(re.findall(r"RINGCOMM_[A-Z_]*[A-Z]", page.read_text()))
        assert variables <= known, page


def call_often(comm):
    for _ in range(1100):
        comm.barrier()
    return [line.count("barrier()") for line in comm._transport.report(2000).splitlines()]


def test_the_flight_record_holds_as_many_calls_as_documented():
    assert all("last 1,023 calls of" in PROSE[name] for name in ("architecture.md", "errors.md"))
    assert harness.run(call_often, 1, world="threads") == [[1023]]


def send_too_little(comm, size):
    x = np.zeros(size, np.uint8)
    if comm.rank == 0:
        comm.send(x, peer=1)
    else:
        raised(MismatchError, lambda: comm.recv(x[:-1], peer=0))
    comm.barrier()


def test_a_sender_learns_of_a_refusal_from_the_documented_size_on():
    assert "at most 128 KiB" in PROSE["errors.md"]
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


def test_the_training_step_prints_the_documented_output():
    code, text = (re.search(rf"```{kind}\n(.*?)```", DOCS["parallel.md"], re.DOTALL)[1] for kind in ("python", "text"))
    assert torch_world.run(printed, 4, code) == [text, "", "", ""]


def test_a_custom_model_trains_and_is_saved(tmp_path):
    code = re.findall(r"```python\n(.*?)```", DOCS["parallel.md"], re.DOTALL)[1]
    code = code.replace('"checkpoint"', repr(str(tmp_path / "checkpoint")))
    expected = "the loss of the last step is less than that of the first\n"
    assert torch_world.run(printed, 4, code) == [expected, "", "", ""]
    assert (tmp_path / "checkpoint" / ".metadata").is_file()
