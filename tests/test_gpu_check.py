"""benchmarks/gpu_check.py: every step is in the report, whatever becomes of it."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from ringcomm.bench.machine import gpus

ROOT = Path(__file__).parent.parent


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu_check")


@pytest.mark.slow
@pytest.mark.skipif(bool(gpus()), reason="there is a GPU: it would take minutes")
def test_without_a_gpu_every_step_says_so_and_the_report_is_written(gpu_check, tmp_path):
    command = [sys.executable, ROOT / "benchmarks/gpu_check.py", "-o", tmp_path / "new"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * harness.OPERATION)
    assert run.returncode == 1
    first, *others = run.stdout.splitlines()
    assert first.startswith("doctor       passed (")
    names = [step.name for step in gpu_check.steps(0, tmp_path)]
    assert others == [f"{name:<12} left out: no CUDA device (0 s)" for name in names[1:]]
    document = json.loads((tmp_path / "new/gpu.json").read_text())
    assert [each["step"]["name"] for each in document["steps"]] == names
    assert document["machine"]["gpus"] == []
    text = (tmp_path / "new/gpu.txt").read_text()
    assert run.stdout in text
    assert "ranks        ok" in text, "what the doctor said"


@pytest.mark.parametrize("number", [1, 2, 8])
def test_all_steps_together_take_16_minutes_at_most(gpu_check, tmp_path, number):
    assert sum(step.seconds for step in gpu_check.steps(number, tmp_path)) <= 16 * 60


def test_a_step_that_there_is_not_is_told(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/gpu_check.py", "-o", tmp_path, "tests", "rests"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=harness.OPERATION)
    assert run.returncode == 2
    assert "no step rests; there are doctor, tests, example," in run.stderr


@pytest.mark.slow
def test_the_sweep_is_tried_on_the_emulated_device(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/gpu_sweep.py", "--emulated", "--json", tmp_path / "sweep.json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * harness.OPERATION)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert {"as it is", "channels 4", "slot_bytes 1,024", "threads 1"} <= {row["shape"] for row in rows}
    assert {row["kernel"] for row in rows} == {"ll", "one_shot", "two_shot", "ring_all_reduce"}
    assert not any(row["wrong"] for row in rows)


@pytest.mark.slow
def test_what_the_sanitizer_is_to_watch_runs_on_the_emulated_device(gpu_check):
    command = [*gpu_check.RINGCOMM, "run", "-n", "2", gpu_check.KERNELS, "--emulated"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * harness.OPERATION)
    assert run.returncode == 0, run.stderr
    assert "every kernel is right" in run.stdout


def attempt(gpu_check, folder, *command, **facts):
    step = gpu_check.Step("step", command, **{"seconds": harness.OPERATION} | facts)
    return gpu_check.attempt(step, ["a GPU"], folder)


def test_a_step_that_fails_has_its_status_and_its_words_in_the_report(gpu_check, tmp_path):
    result = attempt(gpu_check, tmp_path, "sh", "-c", "echo I am lost >&2; exit 3")
    assert (result.outcome, result.reason, result.output) == ("failed", "status 3", "I am lost\n")


def test_a_step_that_takes_too_long_is_ended(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "GRACE", 0.0)
    result = attempt(gpu_check, tmp_path, "sh", "-c", "trap '' INT; sleep 100", seconds=0.5)
    assert (result.outcome, result.reason) == ("failed", "not done within 0.5 s")


def test_a_step_whose_program_is_missing_is_left_out(gpu_check, tmp_path):
    result = attempt(gpu_check, tmp_path, "no-such-sanitizer", program="no-such-sanitizer")
    assert (result.outcome, result.reason) == ("left out", "no-such-sanitizer is not installed")


def test_figures_of_a_benchmark_are_part_of_the_report(gpu_check, tmp_path):
    result = attempt(gpu_check, tmp_path, "sh", "-c", f"echo '[1, 2]' > {tmp_path}/step.json")
    assert (result.outcome, result.figures) == ("passed", [[1, 2]])
