"""`ringcomm run` where a sandbox denies system calls: it goes on without those it can spare, and names others."""

import os
import subprocess
import sys

import pytest

from ringcomm.commands.cli import main
from sandbox import denying

pytestmark = pytest.mark.slow

PROGRAM = """
import numpy as np
import ringcomm

with ringcomm.init(timeout=20) as comm:
    x = np.ones(300_000)
    comm.all_reduce(x)
    comm.all_reduce(comm.empty(1000, "float32"))
    comm.split(0).close()
    print(x[0])
"""
DENIED = "Operation not permitted"


def run(tmp_path, calls, *options):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [*denying(*calls), sys.executable, "-m", "ringcomm", "run", *options, "-n", "2", str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("calls", "warnings"),
    [
        (["sched_setaffinity"], ["sched_setaffinity"]),
        (["sched_getaffinity"], ["sched_getaffinity"]),
        (["prlimit64"], ["getrlimit"]),
        (["sched_setaffinity", "sched_getaffinity", "prlimit64"], ["sched_getaffinity", "getrlimit"]),
    ],
)
def test_ranks_run_without_what_is_denied_and_the_launcher_says_so_once(tmp_path, calls, warnings):
    done = run(tmp_path, calls)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 2.0", "[1] 2.0"]), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(warnings), lines
    for line, call in zip(lines, warnings, strict=True):
        assert line.startswith("ringcomm WARNING: ")
        assert f"the system denies {call}" in line or line.endswith(f"the system denies it ({call}: {DENIED})")


def test_ranks_of_a_benchmark_run_unbound_too():
    code = "from ringcomm.bench.rank.__main__ import bind; bind(0); bind(1)"
    command = [*denying("sched_setaffinity"), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    text = f"the ranks are not bound to cores, so runs differ: [Errno 1] {DENIED}\n"
    assert (done.returncode, done.stderr) == (0, text)


def test_binding_that_was_asked_for_is_refused_with_the_call(tmp_path):
    done = run(tmp_path, ["sched_setaffinity"], "--bind", "core")
    text = f"ringcomm run: --bind core: expected a system that lets ranks be bound, got sched_setaffinity: {DENIED}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", text)


def test_a_call_that_is_needed_is_named(tmp_path):
    done = run(tmp_path, ["setpgid"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "ringcomm run: cannot start the process that ends the ranks: "
        f"the system denies fork, setpgid or what else starts a process ({DENIED})\n"
    )


def test_an_error_without_a_file_names_the_line_that_raised(monkeypatch, capsys):
    def denied(_):
        os.killpg(os.getpgrp(), 1 << 20)  # no such signal

    monkeypatch.setattr("ringcomm.commands.run.run", denied)
    assert main(["run", "-n", "1", "true"]) == 2
    assert capsys.readouterr().err == (
        "ringcomm run: [Errno 22] Invalid argument in os.killpg(os.getpgrp(), 1 << 20)  # no such signal\n"
    )
