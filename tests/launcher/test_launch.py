"""`ringcomm.launch`: call a function on ranks that are threads or fresh processes."""

import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import ringcomm
from ringcomm import Aborted, ArgumentError, Config, MemoryShortage, PeerLost, RingcommError
from ringcomm.bootstrap.store import HashStore
from ringcomm.launcher.pickling import RankResult
from ringcomm.transports import shm

launch_module = importlib.import_module("ringcomm.launcher.launch")
processes_only = pytest.mark.slow


@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.slow)])
def world(request):
    return request.param


@pytest.fixture(autouse=True)
def no_leaks():
    before = footprint()
    yield
    for left, was in zip(footprint(), before, strict=True):
        assert left <= was  # less if garbage of an earlier test was collected


def footprint():
    gc.collect()  # raised errors keep their frames alive
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return threading.active_count(), len(children), len(os.listdir("/proc/self/fd"))


def launch(fn, size=2, world="processes", **given):
    return ringcomm.launch(fn, size, world=world, **{"timeout": 20, **given})


def greet(comm, greeting, mark="."):
    total = comm.all_reduce(np.array([float(comm.rank)]))
    return f"{greeting} {comm.rank} of {comm.size}{mark} {total[0]:g} {comm.timeout:g}"


def test_results_are_in_rank_order(world):
    found = launch(greet, 3, world, args=("rank",), kwargs={"mark": "!"}, timeout=12.5)
    assert found == [f"rank {rank} of 3! 3 12.5" for rank in range(3)]
    assert launch(greet, 1, world, args=("hello",)) == ["hello 0 of 1. 0 20"]


def raise_on_1(comm):
    if comm.rank == 1:
        raise KeyError("the reason")
    comm.barrier()


def test_the_first_failure_is_raised_with_its_rank_and_traceback(world):
    with pytest.raises(KeyError, match="the reason") as raised:
        launch(raise_on_1, 2, world)
    assert raised.value.__notes__[0] == "on rank 1 of 2"
    if world == "processes":
        assert "in raise_on_1\n    raise KeyError" in raised.value.__notes__[1]


def leave_on_1(comm):
    if comm.rank == 1:
        sys.exit(3)
    comm.barrier()


def test_a_rank_that_exits_is_peer_lost(world):
    with pytest.raises(PeerLost, match=r"rank 1 (exited with status 3|raised SystemExit\(3\))") as raised:
        launch(leave_on_1, 2, world)
    assert raised.value.rank == 1
    assert raised.value.__notes__ == ["on rank 1 of 2"]


def die_on_1(comm, number):
    if comm.rank == 1:
        os.kill(os.getpid(), number)
    comm.barrier()


@processes_only
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_peer_lost_with_its_signal(number):
    with pytest.raises(PeerLost, match=f"rank 1 was killed by {number.name} before") as raised:
        launch(die_on_1, args=(number,))
    assert raised.value.rank == 1


def return_early_on_1(comm):
    if comm.rank != 1:
        comm.barrier()


def test_a_rank_that_returns_closes_its_communicator(world):
    with pytest.raises(PeerLost) as raised:
        launch(return_early_on_1, 2, world)
    assert raised.value.rank == 1


def abort_on_1(comm):
    if comm.rank == 1:
        comm.abort("enough")
    comm.barrier()


def test_an_abort_is_raised_with_its_reason(world):
    with pytest.raises(Aborted, match=r"^rank 1 aborted: enough"):
        launch(abort_on_1, 2, world)


def raise_on_1_while_others_are_busy(comm):
    if comm.rank == 1:
        raise KeyError("the reason")
    signal.pause()


@processes_only
def test_a_rank_that_does_not_exit_after_a_failure_is_killed(monkeypatch):
    monkeypatch.setattr(launch_module, "EXIT_TIMEOUT", 0.05)
    with pytest.raises(KeyError, match="the reason"):
        launch(raise_on_1_while_others_are_busy)


class NotPicklable(Exception):
    def __init__(self, first, _second):
        super().__init__(first)


def raise_what_cannot_be_pickled(_):
    error = NotPicklable("the reason", None)
    error.add_note("a note")
    raise error


def raise_what_only_ranks_know(_):
    module = sys.modules["module_of_ranks"] = ModuleType("module_of_ranks")
    module.NotPicklable = type("NotPicklable", (Exception,), {"__module__": "module_of_ranks"})
    raise module.NotPicklable("the reason")


@processes_only
@pytest.mark.parametrize("fn", [raise_what_cannot_be_pickled, raise_what_only_ranks_know])
def test_an_exception_that_cannot_be_pickled_is_described(fn):
    with pytest.raises(RingcommError) as raised:
        launch(fn, 2)
    assert str(raised.value) == "NotPicklable: the reason"
    assert f"in {fn.__name__}" in raised.value.__notes__[1]


def return_what_cannot_be_pickled(_):
    return lambda: None


@processes_only
def test_a_result_that_cannot_be_pickled_fails_its_rank():
    text = r"^result of rank (0|1): expected an object that can be pickled, got a function \(.*pickle.*\)"
    with pytest.raises(ArgumentError, match=text) as raised:
        launch(return_what_cannot_be_pickled, 2)
    assert raised.value.__notes__[0] == f"on rank {raised.value.rank} of 2"


def return_what_cannot_be_unpickled(comm):
    return NotPicklable("the reason", None) if comm.rank == 1 else None


@processes_only
def test_a_result_that_cannot_be_unpickled_fails_its_rank():
    text = r"^result of rank 1: expected an object that can be unpickled, got TypeError: .*argument"
    with pytest.raises(ArgumentError, match=text):
        launch(return_what_cannot_be_unpickled, 2)


class Exits:
    """Ends the program where it is pickled, or unpickled."""

    def __init__(self, how, error):
        self.how, self.error = how, error

    def __reduce__(self):
        if self.how == "pickled":
            raise self.error
        return exit_with, (self.error,)


def exit_with(error):
    raise error


def return_what_exits(comm, how, error):
    return Exits(how, error) if comm.rank == 1 else None


@processes_only
@pytest.mark.parametrize(
    ("how", "error"), [("pickled", SystemExit(3)), ("pickled", KeyboardInterrupt()), ("unpickled", SystemExit(3))]
)
def test_a_result_that_ends_the_program_where_it_is_pickled_fails_its_rank(how, error):
    text = f"^result of rank 1: expected an object that can be {how}, got .*{type(error).__name__}"
    with pytest.raises(ArgumentError, match=text) as raised:
        launch(return_what_exits, 2, args=(how, error))
    assert raised.value.__notes__[0] == "on rank 1 of 2"


def test_the_error_of_the_rank_that_the_others_name_is_raised():
    echo = "rank 2 could not pickle its object, and raised the reason"
    failures = [
        RankResult(0, error=Aborted("rank 1 aborted"), when=0.0, trace="in fn"),
        *(RankResult(rank, error=RingcommError(echo, rank=2), when=1.0, trace="in fn") for rank in (1, 3)),
        RankResult(2, error=RingcommError("rank 2 could not pickle its object: the reason", rank=2), when=2.0),
    ]
    error = launch_module._first_error(failures, 4)
    assert (str(error), error.__notes__) == ("rank 2 could not pickle its object: the reason", ["on rank 2 of 4"])


def kill_the_parent(comm):
    if comm.rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    comm.recv(np.empty(1), 1 - comm.rank)


@processes_only
def test_the_loss_of_the_process_that_forks_the_ranks_is_described():
    with pytest.raises(RingcommError, match=r"^the process that forks the ranks was killed by SIGKILL$"):
        launch(kill_the_parent, 2)


def large(comm):
    return np.full(5_000_000, comm.rank, np.int8)


@processes_only
def test_large_results_arrive():
    for rank, array in enumerate(launch(large)):
        assert array.size == 5_000_000
        assert (array == rank).all()


def draw(_):
    return np.random.rand()


@processes_only
def test_each_process_has_its_own_random_numbers():
    assert len(set(launch(draw))) == 2


@pytest.fixture
def without_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)


@pytest.mark.usefixtures("without_cloudpickle")
def test_a_function_that_cannot_be_pickled_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ArgumentError, match=r"cannot be pickled .* pip install cloudpickle, or use world='threads'"):
        launch(lambda comm: comm.rank)
    assert launch(lambda comm: comm.rank, 2, "threads") == [0, 1]


@processes_only
def test_cloudpickle_sends_a_lambda():
    pytest.importorskip("cloudpickle")
    offset = 5
    assert launch(lambda comm: comm.rank + offset) == [5, 6]


async def coroutine(comm):
    return comm.rank


def test_invalid_arguments_are_refused():
    with pytest.raises(ArgumentError, match="unknown world 'process'; did you mean 'processes'"):
        launch(greet, 2, "process")
    for fn in (3, coroutine):
        with pytest.raises(ArgumentError, match="fn: expected a function that takes a communicator, not a coroutine"):
            launch(fn, 2)
    with pytest.raises(ArgumentError, match="size"):
        launch(greet, 0)
    with pytest.raises(ArgumentError, match=r"size: expected an integer, got 2\.0"):
        launch(greet, 2.0)
    with pytest.raises(ArgumentError, match="timeout"):
        launch(greet, 2, timeout=-1)


def fail_on_1(connect, error):
    def connect_others(rank, *args):
        if rank == 1:
            raise error
        return connect(rank, *args)

    return connect_others


@pytest.mark.parametrize("error", [KeyError("the reason"), MemoryShortage("the reason", rank=1)])
def test_a_rank_that_cannot_connect_does_not_block_the_others(monkeypatch, error):
    monkeypatch.setattr(launch_module, "connect", fail_on_1(launch_module.connect, error))
    start = time.monotonic()
    with pytest.raises(type(error), match="the reason") as raised:
        launch(greet, 3, "threads")
    assert raised.value.__notes__[0] == "on rank 1 of 3" or isinstance(error, RingcommError)
    assert time.monotonic() - start < 10  # half of the timeout


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_map_the_memory_fails_all_ranks(monkeypatch, failing):
    transport = shm.ShmTransport

    def fail(handle, rank, *args):
        made = transport(handle, rank, *args)
        if rank == failing:
            raise MemoryShortage("no room", rank=rank)
        return made

    monkeypatch.setattr(shm, "ShmTransport", fail)
    store, config = HashStore(), Config(timeout=20)
    with ThreadPoolExecutor(3) as pool:
        for outcome in [pool.submit(shm.connect, rank, 3, store, config) for rank in range(3)]:
            with pytest.raises(MemoryShortage, match="no room") as raised:
                outcome.result(timeout=10)
            assert raised.value.rank == failing


@pytest.fixture
def script(tmp_path):
    """Return a function that starts a script."""
    started = []

    def start(text):
        path = tmp_path / "script.py"
        path.write_text("import importlib, os, signal, sys, threading, ringcomm\n" + textwrap.dedent(text))
        started.append(subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@processes_only
def test_a_script_can_launch_its_own_functions_and_classes(script):
    process = script(
        """
        class Result:
            def __init__(self, rank): self.rank = rank
        def fn(comm):
            return Result(comm.rank)
        if __name__ == "__main__":
            print([result.rank for result in ringcomm.launch(fn, 2)])
        """
    )
    assert process.communicate(timeout=30) == (b"[0, 1]\n", b"")


@processes_only
def test_a_script_without_a_main_guard_is_an_error(script):
    process = script("def fn(comm): pass\nringcomm.launch(fn, 2)")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"ArgumentError: importing the script called launch() on a rank" in err


@processes_only
@pytest.mark.parametrize("how", ["-c", "-", "-m"])
def test_a_program_that_cannot_be_imported_needs_cloudpickle(tmp_path, how):
    """The program is a command-line string, stdin, or a __main__.py."""
    (tmp_path / "package").mkdir()

    def start(first):
        code = f"import ringcomm, sys; {first}\ndef fn(comm): return comm.rank\nprint(ringcomm.launch(fn, 2))"
        (tmp_path / "package/__main__.py").write_text(code)
        arguments = {"-c": ["-c", code], "-": ["-"], "-m": ["-m", "package"]}[how]
        command = [sys.executable, *arguments]
        return subprocess.run(command, input=code, capture_output=True, text=True, timeout=30, cwd=tmp_path)

    ended = start("import cloudpickle")
    assert (ended.stdout, ended.stderr) == ("[0, 1]\n", "")
    ended = start("sys.modules['cloudpickle'] = None")
    assert "the main program is not an importable file" in ended.stderr
    assert "pip install cloudpickle, or use world='threads'" in ended.stderr


@processes_only
def test_ranks_inherit_interpreter_flags_and_path(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import pathlib, sys, ringcomm\n"
        "def flags(comm): return sys.flags.optimize, sys.warnoptions, sys._xoptions, 'here' in sys.path\n"
        "if __name__ == '__main__':\n"
        "    sys.path.append(pathlib.Path('here'))\n"
        "    print(ringcomm.launch(flags, 1)[0])"
    )
    command = [sys.executable, "-O", "-W", "ignore::FutureWarning", "-X", "dev", path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert ended.stdout.startswith("(1, ['default', 'ignore::FutureWarning'], {'dev': True}"), ended.stderr


STUBBORN = r"""
def fn(comm):
    if comm.rank == 1:
        os.setsid()  # leave the process group of the ranks
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b"%d\n" % os.getpid())
    threading.Event().wait()
if __name__ == "__main__":
    ringcomm.launch(fn, 3)
"""


@processes_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_processes_die_with_the_launching_process(script, number):
    process = script(STUBBORN)
    ranks = [os.pidfd_open(int(process.stdout.readline())) for _ in range(3)]
    process.send_signal(number)
    try:
        assert all(select.select([fd], [], [], 2)[0] for fd in ranks)
    finally:
        for fd in ranks:
            os.close(fd)
    _, err = process.communicate(timeout=30)
    assert (b"KeyboardInterrupt" in err) == (number == signal.SIGINT)


@processes_only
def test_an_interrupt_aborts_the_threads(script):
    process = script(
        r"""
        errors = []
        def wait_for_ever(comm):
            os.write(1, b"here\n")
            try:
                comm.recv(bytearray(1))
            except ringcomm.Aborted as error:
                errors.append((str(error), error.rank))
        if __name__ == "__main__":
            try:
                ringcomm.launch(wait_for_ever, 2, world="threads")
            except KeyboardInterrupt:
                print(*{*errors}, threading.active_count())
        """
    )
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (b"('the launch was interrupted', None) 1\n", b"")


@processes_only
def test_an_interrupt_does_not_wait_for_a_thread_that_never_ends(script):
    process = script(
        r"""
        def run_for_ever(comm):
            os.write(1, b"here\n")
            while True:
                threading.Event().wait(0.01)
        if __name__ == "__main__":
            importlib.import_module("ringcomm.launcher.launch").EXIT_TIMEOUT = 0.1
            try:
                ringcomm.launch(lambda comm: comm.rank or run_for_ever(comm), 2, world="threads")
            except KeyboardInterrupt:
                print("interrupted")
        """
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == (b"interrupted\n", 0)
    assert b"these threads still run after 0.1 s, and go on until the program exits: rank 0\n" in err


@processes_only
def test_an_interrupt_ends_a_startup_that_waits_for_a_rank(script):
    process = script(
        r"""
        launch_module = importlib.import_module("ringcomm.launcher.launch")
        from ringcomm.bootstrap.session import Contribution
        connect = launch_module.connect
        def stay_away(rank, size, store, config):
            if rank == 1:
                os.write(1, b"here\n")
                store.all_gather(Contribution("never complete", rank, 4, b""), 100)
            return connect(rank, size, store, config)
        if __name__ == "__main__":
            launch_module.connect = stay_away
            try:
                ringcomm.launch(print, 3, world="threads", timeout=100)
            except KeyboardInterrupt:
                print("interrupted", threading.active_count())
        """
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (b"interrupted 1\n", b"")
