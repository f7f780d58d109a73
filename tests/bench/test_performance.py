"""docs/performance.md has the tables of the kept results, and the scripts of benchmarks/ start."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "ArgumentParser" in path.read_text())


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_the_page_has_the_tables_of_the_kept_results(module):
    tables = module("tables")
    text = tables.PAGE.read_text()
    assert text == tables.page(text, json.loads(tables.RESULTS.read_text()))


def bench_row(median, wrong=0):
    case = {"library": "ringcomm", "ranks": 2, "collective": "all_reduce", "bytes": 4, "dtype": "float32", "op": "sum"}
    return {**case, "buffers": "rotated", "median": median, "wrong": wrong}


def test_the_kept_row_is_that_of_the_median_run(module, tmp_path, monkeypatch):
    run = module("run")
    monkeypatch.setattr(run, "MEASUREMENTS", {"all_reduce-2": "all_reduce"})
    folders = [tmp_path / f"run-{i}" for i in range(3)]
    for folder, median in zip(folders, (3.0, 1.0, 2.0), strict=True):
        folder.mkdir()
        document = {"machine": {"cpu": folder.name}, "versions": {}, "failures": [{"reason": "none"}]}
        (folder / "all_reduce-2.json").write_text(json.dumps({**document, "rows": [bench_row(median)]}))
    kept = run.combine(folders)
    assert kept["rows"] == [{"measurement": "all_reduce-2", **bench_row(2.0)}]
    assert kept["machine"] == {"cpu": "run-0"}
    assert [failure["run"] for failure in kept["failures"]] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_benchmarks_starts(script):
    command = [sys.executable, BENCHMARKS / f"{script}.py", "--help"]
    assert "usage" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
