"""ringcomm bench: every row of its table runs and verifies, wrong results are seen, and its output has its columns."""

import argparse
import json
import re
import subprocess
import sys

import numpy as np
import pytest

import harness
from ringcomm import memory
from ringcomm.bench import add_arguments, command, measure, report
from ringcomm.bench.collectives import COLLECTIVES, REDUCTIONS, Setting, count_wrong, fill

MACHINE = report.Machine(cpu="a CPU", cores=2, system="Linux", versions={"ringcomm": "1"}, date="today")


@pytest.fixture
def short(monkeypatch):
    """Measure hastily: the figures do not matter here."""
    monkeypatch.setattr(measure, "ROUNDS", 3)
    monkeypatch.setattr(measure, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 10)


def make_plan(**changes):
    defaults = {
        "collective": "all_reduce",
        "sizes": [4, 1000, 100_000],
        "dtype": "float32",
        "op": "sum",
        "root": 0,
        "in_place": True,
        "symmetric": False,
        "warmups": 1,
    }
    plan = defaults | changes
    return command.Plan(**plan | {"dtype": command.parse_dtype(plan["dtype"])})


def bench(size=3, **changes):
    [(_, rows), *_] = harness.run(command.run_rank, size, make_plan(**changes), MACHINE, world="threads")
    return rows


FORMS = [
    pytest.param(name, in_place, id=f"{name} {'in' if in_place else 'out of'} place")
    for name, row in COLLECTIVES.items()
    for in_place in [True] * row.in_place + [False] * row.out_of_place
]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("symmetric", [False, True], ids=["plain", "symmetric"])
@pytest.mark.parametrize(("name", "in_place"), FORMS)
def test_every_collective_runs_and_verifies(name, in_place, symmetric):
    rows = bench(collective=name, in_place=in_place, symmetric=symmetric, root=1)
    assert [m.wrong for m in rows] == [0] * len(rows)
    assert all(m.bytes == m.count * COLLECTIVES[name].blocks(3) * 4 for m in rows)


def reducible(kind, op):
    if op in ("band", "bor", "bxor"):
        return kind in "iu"
    if op == "avg":
        return kind not in "biu"
    return kind != "c" or op not in ("min", "max")


PAIRS = [
    pytest.param(dtype, op, id=f"{op} of {dtype}")
    for dtype in ("bool", "int8", "uint64", "float16", "float64", "complex64")
    for op in REDUCTIONS
    if reducible(np.dtype(dtype).kind, op)
]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("dtype", "op"), [*PAIRS, ("bfloat16", "sum"), ("bfloat16", "avg")])
def test_every_operation_verifies(dtype, op):
    assert [m.wrong for m in bench(dtype=dtype, op=op, sizes=[1000])] == [0]


def test_wrong_elements_are_counted():
    setting = Setting(rank=1, size=2, count=1000, dtype=np.dtype("int32"), op="sum", root=0)
    array = np.empty((2, 1000), np.int32)
    fill(array, setting)
    expected = [setting.wave(1, block=0), setting.wave(1, block=1)]
    assert count_wrong(array, expected) == 0
    array[0, 3] += 1
    array[1, -1] += 1
    assert count_wrong(array, expected) == 2
    assert count_wrong(np.roll(array, 64), expected) > 1000, "a displaced block must not look right"


def test_memcpy_is_measured_with_what_fits_into_memory(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: memory.Headroom(80 << 20, "what this test allows"))
    results = harness.run(measure.measure_memcpy, 2, 2, world="threads")
    assert [result.bytes for result in results] == [8 << 20] * 2  # three of them on each rank, and next 96 MiB in all
    assert results[0].speed == results[1].speed > 0


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_the_expected_result_is_the_loop_over_the_ranks(op):
    setting = Setting(rank=0, size=5, count=100, dtype=np.dtype("float32"), op=op, root=0)
    inputs = [np.resize(setting.wave(rank), 1000) for rank in range(5)]
    result = inputs[0]
    for other in inputs[1:]:
        result = REDUCTIONS[op](result, other)
    np.testing.assert_array_equal(np.resize(setting.reduced(), 1000), result)


@pytest.mark.parametrize(
    ("name", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 1)],
)
def test_bus_factors_are_those_of_nccl_tests(name, factor):
    assert COLLECTIVES[name].bus_factor(4) == factor


@pytest.mark.parametrize(("text", "value"), [("4", 4), ("64K", 65536), ("3m", 3 << 20), ("1G", 1 << 30)])
def test_sizes_are_read_with_suffixes(text, value):
    assert command.parse_bytes(text) == value


@pytest.mark.parametrize("words", ["-b 0", "-b 4X", "-f 1", "-n 0", "--op median", "--dtype float31"])
def test_what_makes_no_sense_is_refused(words, capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["all_reduce", *words.split()])
    assert words.split()[0] in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(tmp_path):
    words = ["bench", "all_reduce", "-n", "2", "-e", "1K", "--json", str(tmp_path / "out.json")]
    run = subprocess.run([sys.executable, "-m", "ringcomm", *words], capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    assert not run.stderr, "no progress bar where there is no terminal"
    comments = [line for line in run.stdout.splitlines() if line.startswith("#")]
    table = [line.split() for line in run.stdout.splitlines() if not line.startswith("#")]
    assert comments[-2].split()[1:] == [name for name, _ in report.COLUMNS]
    assert re.search(r"memcpy: \d+\.\d GB/s per core \(\d+ MiB, all ranks at once\)", run.stdout)
    assert [cells[0] for cells in table] == ["4", "16", "64", "256", "1024"]
    assert all(cells[2:5] == ["float32", "sum", "-1"] and cells[-1] == "0" for cells in table)
    document = json.loads((tmp_path / "out.json").read_text())
    assert [row["bytes"] for row in document["rows"]] == [4, 16, 64, 256, 1024]
    assert all(row["seconds_median"] <= row["seconds_p90"] <= row["seconds_p99"] for row in document["rows"])
    assert document["ranks"] == 2
