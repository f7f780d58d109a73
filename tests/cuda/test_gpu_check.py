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
from ringcomm.types import KERNELS

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


def test_output_is_in_the_log_while_the_step_runs(run_of, step, tmp_path):
    run = run_of(gpu=False)
    log = f"{tmp_path}/log.txt"
    assert run.take([step(f"echo early; until grep -q ']* early' {log}; do sleep 0.01; done")])


def test_what_a_step_leaves_in_a_session_of_its_own_ends_with_it(tmp_path):
    """In a process of its own, which adopts the orphans of its steps."""
    script = f"""
import sys; sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from pathlib import Path
from gpu.runner import Run, Step
run = Run(Path({str(tmp_path)!r}), 20, False, adopting=True)
run.take([Step("daemon", ("sh", "-c", "setsid sleep 100 >/dev/null 2>&1 & echo $!"), 0.1, 10, gpu=False)])
print(run.results[0].lines[-1])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=harness.OPERATION)
    assert run.returncode == 0, run.stderr
    pid = int(run.stdout.split()[-1])
    deadline = time.monotonic() + harness.OPERATION
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def test_a_gpu_that_does_not_answer_ends_the_run(module, run_of, step, monkeypatch):
    monkeypatch.setattr(module("gpu.runner"), "PROBE", "raise SystemExit('no')")
    run = run_of()
    assert not run.take([step("exit 1", "first", gpu=True), step("", "second")])
    assert [result.name for result in run.results] == ["first", "probe"]
    assert "the GPU does not answer after first: no" in str(run.results[-1])


def test_after_a_failure_the_run_continues_where_the_gpu_answers(module, run_of, step, monkeypatch):
    monkeypatch.setattr(module("gpu.runner"), "PROBE", "print('it answers')")
    run = run_of()
    run.take([step("exit 1", "first", gpu=True), step("", "second")])
    assert [str(result).split()[:2] for result in run.results] == [["first", "failed:"], ["second", "passed"]]


def test_the_summary_is_short_and_shows_the_last_lines_of_each_step(module, run_of, step):
    run = run_of(gpu=False)
    run.take([step("seq -f 'error %g' 1 5000", f"long-{i}") for i in range(3)] + [step("echo error once", "short")])
    text = run.summary()
    assert 11_000 < len(text) <= module("gpu.runner").SUMMARY
    assert text.count("error 5000\n") == 3
    assert "error once" in text


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


def test_the_kernels_to_compile_begin_with_float32(module):
    found = module("gpu.precompile").variants()
    assert len({*found}) == len(found) > 300
    assert {each.kernel for each in found[: 2 * len(KERNELS)]} == {*KERNELS.values()}


def fatbin(entries):
    """Return a container with entries of (kind, architecture, payload), as nvcc writes them."""
    body = b""
    for kind, architecture, payload in entries:
        head = kind.to_bytes(2, "little") + bytes(2) + (64).to_bytes(4, "little") + len(payload).to_bytes(8, "little")
        body += (head + bytes(12) + architecture.to_bytes(4, "little")).ljust(64, b"\0") + payload
    head = (0xBA55ED50).to_bytes(4, "little") + (1).to_bytes(2, "little") + (16).to_bytes(2, "little")
    return head + len(body).to_bytes(8, "little") + body


def test_machine_code_of_other_architectures_is_zeroed(module):
    names, code = b"\0.nv_fatbin\0", fatbin([(2, 80, b"a" * 32), (2, 90, b"b" * 40), (1, 90, b"c" * 24)])
    begin = 64 + len(code) + len(names)
    section = lambda name, offset, size: b"".join(  # noqa: E731
        value.to_bytes(width, "little")
        for value, width in ((name, 4), (0, 4), (0, 8), (0, 8), (offset, 8), (size, 8), (0, 24))
    )
    table = section(1, 64, len(code)) + section(0, 64 + len(code), len(names))
    head = bytearray(64)
    head[0x28:0x30] = begin.to_bytes(8, "little")
    for at, value in ((0x3A, 64), (0x3C, 2), (0x3E, 1)):
        head[at : at + 2] = value.to_bytes(2, "little")
    data = head + code + names + table
    before = bytes(data)
    assert module("gpu.trim_nccl").trim(data, 90) == (40, 56)
    assert len(data) == len(before)
    assert b"b" * 40 in data
    assert b"a" not in data[64 : 64 + len(code)]
    assert b"c" not in data[64 : 64 + len(code)]


@pytest.mark.slow
def test_a_packed_folder_runs_without_network(tmp_path):
    """With an empty wheel in place of ringcomm, which is installed here already."""
    from zipfile import ZipFile

    folder = tmp_path / "packed"
    (folder / "wheels").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: nothing\nVersion: 1\n"
    with ZipFile(folder / "wheels/nothing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("nothing-1.dist-info/METADATA", metadata)
        wheel.writestr("nothing-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("nothing-1.dist-info/RECORD", "")
    (folder / "repository").symlink_to(ROOT)
    (folder / "install.sh").write_bytes((ROOT / "benchmarks/gpu/install.sh").read_bytes())
    before = {*Path("/tmp").glob("ringcomm-gpu-*")}
    command = ["bash", folder / "install.sh", tmp_path / "out", "60", "--emulated", "symmetric"]
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * harness.OPERATION, env=os.environ | path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "symmetric      passed" in (tmp_path / "out/summary.txt").read_text()
    assert {*Path("/tmp").glob("ringcomm-gpu-*")} == before


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
