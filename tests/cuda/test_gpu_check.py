"""benchmarks/gpu_check.py: every step is in the report, however it ends, and a broken kernel fails its step."""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import harness
from cases.broken_kernels import BROKEN, beyond, break_launches, nothing
from ringcomm.bench.machine import gpus

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "benchmarks/gpu_check.py"
MARK = "GPU_CHECK_TEST"  # in the environment of all processes of a run


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.fixture
def run_of(module, tmp_path):
    """Return a function that makes a run of so many seconds."""
    runner = module("gpu.runner")

    def make(budget=harness.OPERATION, gpu=True):
        return runner.Run(tmp_path, budget, gpu)

    return make


@pytest.fixture
def step(module):
    """Return a function that makes a step which needs no GPU."""

    def make(script, name="step", **facts):
        given = {"usual": 0.1, "limit": harness.OPERATION, "gpu": False, "program": "sh"} | facts
        return module("gpu.runner").Step(name, ("sh", "-c", script), **given)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_processes_and_leaves_the_summary(tmp_path, number):
    command = [sys.executable, CHECK, "--emulated", "-o", tmp_path, "values", "stress", "--budget", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {MARK: str(tmp_path)}) as check:
        log = tmp_path / "log.txt"
        deadline = time.monotonic() + harness.OPERATION
        while not log.exists() or "check=values" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        check.send_signal(number)
        out, _ = check.communicate(timeout=harness.OPERATION)
    assert check.returncode == 128 + number
    assert "---- summary" in out
    marked = [path for path in Path("/proc").glob("[0-9]*/environ") if f"{MARK}={tmp_path}" in read(path)]
    assert not marked


def read(path):
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended
        return ""


@pytest.mark.slow
@pytest.mark.skipif(bool(gpus()), reason="takes minutes on a GPU")
def test_on_the_emulated_device_the_kernels_are_checked_and_the_rest_is_skipped(tmp_path):
    names = ["values", "symmetric", "processes", "stress", "tests", "memcheck"]
    command = [sys.executable, CHECK, "--emulated", "--budget", "100", "-o", tmp_path / "new", *names]
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * harness.OPERATION)
    assert run.returncode == 0, run.stdout + run.stderr
    first, *others = run.stdout.splitlines()
    assert ", no GPU, " in first
    outcomes = {line.split()[0]: line.split()[1] for line in others[: len(names)]}
    skipped = ("tests", "memcheck")
    assert outcomes == {name: "skipped:" if name in skipped else "passed" for name in names}
    rows = [json.loads(line) for line in (tmp_path / "new/rows.jsonl").read_text().splitlines()]
    assert {row["check"] for row in rows} == {"values", "symmetric", "processes", "stress"}
    assert not any(row["wrong"] for row in rows)
    assert run.stdout.endswith((tmp_path / "new/summary.txt").read_text() + "\n")


@pytest.mark.skipif(bool(gpus()), reason="takes minutes on a GPU")
def test_without_a_gpu_the_check_fails(tmp_path):
    command = [sys.executable, CHECK, "-o", tmp_path, "memcheck"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=harness.OPERATION)
    assert run.returncode == 1
    assert "memcheck       skipped: no CUDA device" in run.stdout


def test_each_group_of_steps_fits_its_budget(module, tmp_path):
    steps = module("gpu.steps")
    groups = {"alone": steps.alone(tmp_path, False), "many": steps.many(tmp_path, tmp_path, None, None)}
    assert {*groups} == {*steps.GROUPS}
    for name, group in groups.items():
        in_turn = sum(each.usual for each in group if not each.background)
        assert in_turn <= steps.GROUPS[name] - module("gpu.runner").RESERVE
        assert all(each.usual <= each.limit for each in group)
    names = [each.name for group in groups.values() for each in group]
    assert len({*names}) == len(names)


def test_an_unknown_step_is_refused(tmp_path):
    command = [sys.executable, CHECK, "-o", tmp_path, "values", "rests"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=harness.OPERATION)
    assert run.returncode == 2
    assert "unknown step rests; expected some of alone, many, info, precompile, values," in run.stderr


@pytest.mark.parametrize(
    ("script", "facts", "outcome", "lines"),
    [
        ("echo I am lost >&2; exit 3", {}, "failed: status 3", ["I am lost"]),
        ("echo begin; trap '' INT; sleep 100", {"limit": 0.5}, "failed: timed out after 0 s", ["begin"]),
        ("trap 'echo rows are written; exit' INT; sleep 1 & wait", {"limit": 0.5}, "failed: timed out", ["rows are"]),
        ("", {"program": "no-such-tool"}, "skipped: no-such-tool is not installed", []),
        ("", {"gpu": True}, "skipped: no CUDA device", []),
        ("", {"usual": 1000.0}, "skipped: takes 1000 s", []),
        ("echo here; echo some error; echo there", {}, "passed", ["some error"]),
    ],
    ids=["failed", "killed", "interrupted", "program missing", "no GPU", "no time", "passed"],
)
def test_a_step_has_its_outcome_and_its_telling_lines(module, run_of, step, monkeypatch, script, facts, outcome, lines):
    monkeypatch.setattr(module("gpu.runner"), "INTERRUPT_TIMEOUT", 0.3)
    run = run_of(gpu=False)
    assert run.take([step(script, **facts)]) == (not outcome.startswith("failed"))
    [result] = run.results
    assert outcome in str(result)
    assert len(result.lines) == len(lines)
    assert all(line.startswith(each) for line, each in zip(result.lines, lines, strict=True))


def test_a_background_step_ends_before_the_step_that_needs_it(run_of, step, tmp_path):
    file = tmp_path / "made"
    steps = [
        step(f"sleep 0.2; touch {file}", "make", background=True),
        step(f"test ! -e {file}", "beside"),
        step(f"test -e {file}", "needs", after="make"),
    ]
    run = run_of(gpu=False)
    assert run.take(steps)
    assert [result.name for result in run.results] == ["beside", "make", "needs"]


@pytest.mark.parametrize(
    ("probe", "name", "words"),
    [
        ("print('it answers')", "second", "passed"),
        ("raise SystemExit('no')", "probe", "the GPU does not answer after first: no"),
    ],
)
def test_after_a_failure_the_run_goes_on_if_the_gpu_answers(module, run_of, step, monkeypatch, probe, name, words):
    monkeypatch.setattr(module("gpu.runner"), "PROBE", probe)
    run = run_of()
    assert not run.take([step("exit 1", "first", gpu=True), step("", "second")])
    first, last = run.results
    assert (first.name, last.name) == ("first", name)
    assert str(first).split()[1] == "failed:"
    assert words in str(last)


# The checks compare in the same way, so that one of them meets every broken kernel.
@pytest.mark.parametrize(
    ("check", "broken"),
    [("values", broken) for broken in BROKEN]
    + [(check, broken) for check in ("symmetric", "dtypes", "stress") for broken in (nothing, beyond)],
    ids=lambda it: getattr(it, "__name__", it),
)
def test_every_broken_kernel_is_reported(module, monkeypatch, check, broken, capsys):
    break_launches(monkeypatch, broken)
    options = {"emulated": True, "small": False, "ranks": [2], "rows": None, "seconds": 10, "only": ""}
    kernels = module("gpu.kernels").Kernels(argparse.Namespace(**options))
    assert not getattr(kernels, check)()
    rows = capsys.readouterr().out.splitlines()
    assert rows
    right = "edge=0" if broken is beyond else "wrong=0"
    assert not any(right in row for row in rows)


@pytest.mark.slow
def test_the_sweep_runs_on_the_emulated_device(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/gpu_sweep.py", "--emulated", "--json", tmp_path / "sweep.json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * harness.OPERATION)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert {"unchanged", "channels 4", "slot_bytes 1,024", "threads 1"} <= {row["shape"] for row in rows}
    assert not any(row["wrong"] for row in rows)


@pytest.mark.slow
def test_the_program_for_many_processes_runs_on_the_emulated_device(module):
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "2", module("gpu.steps").EVERY_KERNEL, "--emulated"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * harness.OPERATION)
    assert run.returncode == 0, run.stderr
    assert "every kernel is right" in run.stdout
