"""docs/clients.md is true: it names every program, and the versions that run here."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text()
GROUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["clients"]
PINNED = dict(line.split("==") for line in GROUP if "==" in line)
PROGRAMS = [path for path in Path(__file__).with_name("programs").glob("*.py") if path.name != "tiny.py"]


@pytest.mark.parametrize("name", PINNED)
def test_the_page_states_the_version(name):
    client = name.removeprefix("pytorch-")
    assert any(client in row.lower() and f"| {PINNED[name]} |" in row for row in PAGE.splitlines())
    try:
        installed = version(name).partition("+")[0]
    except PackageNotFoundError:
        pytest.skip(f"needs {name}: pip install --group clients")
    assert installed == PINNED[name]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_the_page_links_the_program(program):
    assert f"(../{program.relative_to(ROOT)})" in PAGE
