"""`ringcomm run` where a sandbox denies system calls: it goes on without those it can spare, and names others."""

import socket
import subprocess
import sys

import pytest

from harness.sandbox import denying
from ringcomm.commands.cli import main

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
        f"ringcomm run: cannot start the process that ends the ranks: the system denies fork or setpgid ({DENIED})\n"
    )


def test_a_call_without_a_file_that_is_denied_is_named(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from ringcomm.commands import cli, run\n"
        "run.run = lambda _: print() or os.setpgid(0, os.getpid())  # as a comment\n"
        "sys.exit(cli.main(['run', '-n', '1', 'true']))\n"
    )
    done = subprocess.run(
        [*denying("setpgid"), sys.executable, program], capture_output=True, text=True, timeout=60, check=False
    )
    text = "ringcomm run: [Errno 1] Operation not permitted: the system denies os.setpgid\n"
    assert (done.returncode, done.stderr) == (2, text)


def test_another_error_has_no_line_of_the_source(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    monkeypatch.setattr("ringcomm.commands.run.run", lambda _: socket.create_connection(address))
    assert main(["run", "-n", "1", "true"]) == 2
    assert capsys.readouterr().err == "ringcomm run: [Errno 111] Connection refused\n"


def test_the_pool_of_mpi4py_starts_where_the_question_for_cores_is_denied():
    code = (
        "from ringcomm.mpi4py.futures import MPIPoolExecutor as Pool; print(Pool(main=False).submit(abs, -7).result())"
    )
    command = [*denying("sched_getaffinity"), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def test_a_benchmark_is_disturbed_where_binding_is_denied():
    code = "from ringcomm.bench.noise import noise\nwith noise([0]): print(1)"
    command = [*denying("sched_getaffinity", "sched_setaffinity"), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
