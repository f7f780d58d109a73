"""docs/performance.md and README.md have the tables of the kept results, and the scripts of benchmarks/ start."""

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
from test_bench import parse

from ringcomm.bench.command import sweep_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "ArgumentParser" in path.read_text())


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_the_pages_have_the_tables_of_the_kept_results(module):
    tables = module("tables")
    for path, make in tables.PAGES.items():
        text = path.read_text()
        assert text == tables.page(text, make(tables.results())), path
    assert all(each.path.with_suffix(".png").exists() for each in tables.results())


def test_the_pages_have_the_tables_of_the_gpus(module):
    tables = module("gpu_tables")
    for path, make in tables.PAGES.items():
        text = path.read_text()
        assert text == tables.page(text, tables.joined(make())), path


def test_bench_accepts_every_measurement(module):
    for words in module("run").MEASUREMENTS.values():
        assert sweep_of(parse(words)).cases(2)


def bench_row(median, worst, rounds=20):
    case = {"library": "ringcomm", "ranks": 2, "collective": "all_reduce", "bytes": 4, "dtype": "float32", "op": "sum"}
    return {**case, "buffers": "rotated", "median": median, "worst": worst, "rounds": rounds}


def test_the_kept_row_is_that_of_the_median_run_with_the_worst_round_of_all(module, tmp_path, monkeypatch):
    run = module("run")
    monkeypatch.setattr(run, "MEASUREMENTS", {"all_reduce-2": "all_reduce", "absent": ""})
    folders = [tmp_path / f"run-{i}" for i in range(3)]
    for folder, median in zip(folders, (3.0, 1.0, 2.0), strict=True):
        folder.mkdir()
        document = {
            "machine": {"cpu": folder.name},
            "versions": {},
            "failures": [{"reason": "none"}],
            "lines": [median],
        }
        (folder / "all_reduce-2.json").write_text(json.dumps({**document, "rows": [bench_row(median, 3 * median)]}))
    kept = run.combine(folders)
    assert kept["rows"] == [{"measurement": "all_reduce-2", **bench_row(2.0, 9.0, rounds=60)}]
    assert kept["machine"] == {"cpu": "run-0"}
    assert kept["lines"] == [3.0, 1.0, 2.0]
    assert [failure["run"] for failure in kept["failures"]] == [1, 2, 3]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.usefixtures("module")
def test_a_script_of_benchmarks_starts(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(f"{BENCHMARKS}/{script}.py", run_name="__main__")
    assert end.value.code == 0
    assert "usage" in capsys.readouterr().out
