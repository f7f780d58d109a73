"""docs/performance.md tells the truth: its tables between hosts are those of the results that are kept."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "performance.md").read_text()


@pytest.fixture
def mpi_tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("mpi_tables")


def row(contender, size, median, **more):
    return {"contender": contender, "ranks": 4, "bytes": size, "median": median, "cpu": 4 * median, **more}


def test_the_tables_between_hosts_are_those_of_the_results_that_are_kept(mpi_tables):
    results = ROOT / "docs" / re.search(r"\]\((\S+/mpi\.json)\)", PAGE)[1]
    tables = mpi_tables.tables(json.loads(results.read_text())).split("\n\n")
    assert len(tables) == 7
    for table in tables:
        assert table in PAGE


def test_a_lead_is_the_time_of_mpi_over_that_of_a_contender(mpi_tables):
    times = mpi_tables.Times([row("MPI", 1000, 3.0), row("ring", 1000, 2.0)])
    assert times.lead("ring", 1000) == 1.5
    assert times.busbw("ring", 1000) == 2 * 3 / 4 * 1000 / 2


def test_a_step_costs_what_many_take_more_than_few(mpi_tables):
    rows = [row(f"ringcomm {count}", 4, 100 + 7.0 * count) for count in (2, 20, 40)]
    times = mpi_tables.Times([*rows, row("tests 2", 4, 1), row("tests 40", 4, 39)])
    assert times.step("ringcomm", "wall") == times.step("ringcomm", "cpu") == 7
    assert times.step("tests", "wall") == 1


@pytest.mark.parametrize("script", ["gpu_check", "mpi", "parallel", "run", "torch_backend"])
def test_a_script_of_benchmarks_starts(script):
    command = [sys.executable, ROOT / "benchmarks" / f"{script}.py", "--help"]
    assert "usage" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_figures_of_training_are_those_of_the_results():
    page = (ROOT / "docs" / "parallel.md").read_text()
    results = ROOT / "docs" / re.search(r"\]\((\S+/parallel\.json)\)", page)[1]
    command = [sys.executable, ROOT / "benchmarks" / "parallel.py", "--read", results]
    table, _ = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n\n")
    assert table in page
