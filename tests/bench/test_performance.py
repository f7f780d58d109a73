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


def kept(folder, name, ours, measurements):
    """Keep results in which the time of ringcomm is `ours` seconds, and that of each peer a millisecond more."""
    machine = {"cpu": name, "cores": 2, "cache": 32 << 20, "system": "Linux", "python": "3.12", "date": "2026-11-30"}
    rows = [
        {**bench_row(median, 3 * median), "library": library, "measurement": measurement, "wrong": 0}
        | {"settled": median / 2, "busbw": 2e9, "memcpy": 4e9, "bytes": 1 << 10}
        for measurement in measurements
        for library, median in (("ringcomm", ours), ("openmpi/multiple", 0.001), ("mpich", 0.0005))
    ]
    path = folder / "results" / f"2026-11-30-{name}-2-cores.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "rows": rows}))
    return path


def test_each_condition_has_its_table(module, tmp_path):
    tables = module("tables")
    path = kept(tmp_path, "cpu", 0.00025, ["all_reduce-2", "shared_arrays-2", "unbound-2", "noise-2"])
    parts = [part.splitlines() for part in tables.of_machine(tables.Results(path))]
    private, shared, unbound, noise = (part for part in parts[4:] if part[0].startswith("|"))
    assert private == ["| | 1 KiB |", "|---|---|", "| all_reduce, 2 ranks | 2.00 |"]
    assert shared == [*private, "| all_reduce, busbw / memcpy | 0.50 |"]
    assert unbound[0] == "| | ringcomm | openmpi/multiple | mpich |"
    assert unbound[2] == "| all_reduce | 125 / 750 (6.00) | 500 / 3,000 (6.00) | 250 / 1,500 (6.00) |"
    assert noise[2] == "| all_reduce, 2 ranks | 4.00 |", "over Open MPI, though MPICH is faster"


def test_the_readme_has_the_median_machine_and_a_line_for_each(module, tmp_path, monkeypatch):
    tables = module("tables")
    monkeypatch.setattr(tables, "HERE", tmp_path)
    for name, ours in (("fast", 0.0001), ("usual", 0.0002), ("slow", 0.0004)):
        kept(tmp_path, name, ours, ["all_reduce-2"])
    old = kept(tmp_path, "slow", 0.0001, ["all_reduce-2"])
    old.rename(old.with_name(old.name.replace("30", "29")))
    kept(tmp_path, "slow", 0.0004, ["all_reduce-2"])
    text = tables.of_readme(tables.results())
    assert text.startswith("\nusual; 2 cores; 2026-11-30:\n\n| | 1 KiB |")
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    assert lines == [
        *("- usual; 2 cores: 2.50, 2.50 to 2.50", "- fast; 2 cores: 5.00, 5.00 to 5.00"),
        "- slow; 2 cores: 1.25, 1.25 to 1.25",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.usefixtures("module")
def test_a_script_of_benchmarks_starts(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(f"{BENCHMARKS}/{script}.py", run_name="__main__")
    assert end.value.code == 0
    assert "usage" in capsys.readouterr().out
