"""benchmarks/gpu_check.py: every step is in the report, however it ends."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from ringcomm.bench.machine import gpus

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu_check")


@pytest.mark.slow
@pytest.mark.skipif(bool(gpus()), reason="takes minutes on a GPU")
def test_without_a_gpu_the_report_has_every_step_as_skipped(gpu_check, tmp_path):
    command = [sys.executable, ROOT / "benchmarks/gpu_check.py", "-o", tmp_path / "new"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * harness.OPERATION)
    assert run.returncode == 1
    first, *others = run.stdout.splitlines()
    assert first.startswith("doctor       passed (")
    names = [step.name for step in gpu_check.steps(0, tmp_path)]
    assert others == [f"{name:<12} skipped: no CUDA device (0 s)" for name in names[1:]]
    text = (tmp_path / "new/gpu.txt").read_text()
    assert ", no GPU, " in text
    assert run.stdout in text
    assert "ranks        ok" in text, "the output of doctor"


@pytest.mark.parametrize("number", [1, 2, 8])
def test_all_steps_together_take_16_minutes_at_most(gpu_check, tmp_path, number):
    assert sum(step.seconds for step in gpu_check.steps(number, tmp_path)) <= 16 * 60


def test_an_unknown_step_is_refused(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/gpu_check.py", "-o", tmp_path, "tests", "rests"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=harness.OPERATION)
    assert run.returncode == 2
    assert "unknown step rests; the steps are doctor, tests, example," in run.stderr


@pytest.mark.slow
def test_the_sweep_runs_on_the_emulated_device(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/gpu_sweep.py", "--emulated", "--json", tmp_path / "sweep.json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * harness.OPERATION)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert {"unchanged", "channels 4", "slot_bytes 1,024", "threads 1"} <= {row["shape"] for row in rows}
    assert {row["kernel"] for row in rows} == {"ll", "one_shot", "two_shot", "ring_all_reduce"}
    assert not any(row["wrong"] for row in rows)


@pytest.mark.slow
def test_the_program_for_the_sanitizer_runs_on_the_emulated_device(gpu_check):
    command = [*gpu_check.RINGCOMM, "run", "-n", "2", gpu_check.KERNELS, "--emulated"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * harness.OPERATION)
    assert run.returncode == 0, run.stderr
    assert "every kernel is right" in run.stdout


@pytest.mark.parametrize(
    ("script", "facts", "result"),
    [
        ("echo I am lost >&2; exit 3", {}, ("failed", "status 3", "I am lost\n")),
        ("trap '' INT; sleep 100", {"seconds": 0.5}, ("failed", "timed out after 0.5 s", "")),
        ("", {"program": "no-such-tool"}, ("skipped", "no-such-tool is not installed", "")),
        ("echo here", {}, ("passed", "", "here\n")),
    ],
    ids=["failed", "timed out", "program missing", "passed"],
)
def test_the_report_has_outcome_reason_and_output_of_a_step(gpu_check, monkeypatch, script, facts, result):
    monkeypatch.setattr(gpu_check, "EXIT_TIMEOUT", 0.0)
    step = gpu_check.Step("step", ("sh", "-c", script), **{"seconds": harness.OPERATION} | facts)
    found = gpu_check.attempt(step, ["a GPU"])
    assert (found.outcome, found.reason, found.output) == result
