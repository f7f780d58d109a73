"""Too little memory: every rank raises an error with figures; no rank gets SIGBUS or an OOM kill later."""

import os
import re
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

import harness
from harness.failures import check_usable, raised
from ringcomm import Config, MemoryShortage
from ringcomm.bootstrap.store import HashStore
from ringcomm.machine.cgroup import groups
from ringcomm.start import connect

MIB = 1 << 20
LIMIT = 300 * MIB  # less than the arenas of 64 ranks
LIMITS = ["RLIMIT_AS", "RLIMIT_FSIZE"]
FIGURES = r"needs [\d,]+\.\d MiB, but only [\d,]+\.\d MiB are available: "


@contextmanager
def limited(name):
    """Limit this process to one more MiB."""
    limit = getattr(resource, name)
    soft, hard = resource.getrlimit(limit)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if name == "RLIMIT_AS" else 0
    resource.setrlimit(limit, (pages * resource.getpagesize() + MIB, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("ranks", [(0, 1, 2), (0,), (2,)])
@pytest.mark.parametrize("what", ["group", "buffer"])
@pytest.mark.ranks(3, world="processes")
def test_a_group_or_buffer_that_does_not_fit_is_refused_on_every_rank(comm, what, name, ranks):
    allocate = {"group": lambda: comm.split(0), "buffer": lambda: comm.empty(4 * MIB, "float32")}[what]
    with limited(name) if comm.rank in ranks else nullcontext():
        error = raised(MemoryShortage, allocate)
        comm.barrier()
    assert re.search(FIGURES + name, str(error)), error
    check_usable(comm)
    allocated = allocate()  # the refused allocation has left nothing behind
    if what == "group":
        with allocated:
            check_usable(allocated)
    else:
        allocated[:] = comm.rank
        comm.barrier()
        assert (comm.all_reduce(allocated, "max") == comm.size - 1).all()


@pytest.mark.ranks(2)
def test_an_impossible_size_is_refused_with_figures(comm):
    for count in (1 << 40, 1 << 60, 1 << 62, 1 << 63, 1 << 70):
        error = raised(MemoryShortage, lambda count=count: comm.empty(count, "float64"))
        assert f"a symmetric buffer of {8 * count} bytes on each of 2 ranks" in str(error)
        assert re.search(FIGURES, str(error)), error
    check_usable(comm)


@pytest.mark.ranks(3)
def test_parts_that_fit_alone_but_not_together_are_refused(comm):
    meminfo = Path("/proc/meminfo").read_text()
    available = int(re.search(r"MemAvailable: +(\d+) kB", meminfo)[1]) << 10
    each = available // comm.size + 100 * MIB  # each fits alone, all together do not
    error = raised(MemoryShortage, lambda: comm.empty(comm.broadcast_object(each), "int8"))
    assert re.search(FIGURES, str(error)), error
    check_usable(comm)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.ranks(2, world="processes")
def test_arenas_that_do_not_fit_are_refused_on_every_rank(comm, name):  # noqa: ARG001 (this process is limited, not its world)
    """Connect two threads of this process without memory for their arenas."""
    store = HashStore()
    config = Config(timeout=harness.OPERATION)
    both = threading.Barrier(2)

    def rank(number):
        return raised(MemoryShortage, lambda: connect(number, 2, store, config))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: both.wait(), range(2)))  # started before the limit: a thread needs memory too
        with limited(name):
            for error in pool.map(rank, range(2)):
                assert re.fullmatch("the arenas of 2 ranks " + FIGURES + name + ".*", str(error)), error


# --- Processes with a low limit from the beginning --------------------------------------------------------------------

PROGRAM = """
import resource, sys
import numpy as np, ringcomm

def fill(comm):
    buffers = []
    try:
        while True:
            buffers.append(comm.empty(16 << 20, "uint8"))
            buffers[-1][:] = comm.rank
    except ringcomm.MemoryShortage as error:
        text = str(error)
    for buffer in buffers:
        comm.barrier()
        comm.all_reduce(buffer, "max")
        assert buffer.min() == buffer.max() == comm.size - 1
    comm.empty(1000, "uint8")  # the refused buffer has taken no memory
    return len(buffers), text

if len(sys.argv) > 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
for size in (2, 64):
    try:
        for count, text in ringcomm.launch(fill, size, world="threads"):
            print(size, count, text)
    except ringcomm.MemoryShortage as error:
        print(size, "refused", error)
"""


def run_program(*arguments, **how):
    command = [sys.executable, "-P", "-c", PROGRAM, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=harness.JOB, **how)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    *filled, refused = ended.stdout.splitlines()
    assert len(filled) == 2
    buffer = "a symmetric buffer of 16777216 bytes on each of 2 ranks "
    for line in filled:
        reasons = rf"{buffer}{FIGURES}|(extending .*: )?reserving \d+ bytes .*: File too large"
        assert re.match(rf"2 \d (rank \d: )?({reasons})", line), line
    assert re.match("64 refused the arenas of 64 ranks " + FIGURES, refused), refused
    return ended.stdout


@pytest.mark.slow
def test_all_memory_below_a_file_size_limit_is_usable():
    run_program(str(LIMIT))


@pytest.fixture
def control_group():
    """Create a child control group with LIMIT bytes; yield its folder."""
    folder, unified = next(iter(groups("memory")), (None, False))
    if folder is None:
        pytest.skip("this process is in no control group for memory")
    group = folder / f"ringcomm-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot create a control group here: {error}")
    try:
        (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(LIMIT))
    except OSError as error:
        group.rmdir()
        pytest.skip(f"control groups here do not limit memory: {error}")
    yield group
    group.rmdir()


@pytest.mark.slow
def test_all_memory_of_a_control_group_is_usable_and_no_rank_is_killed(control_group):
    def enter():
        (control_group / "cgroup.procs").write_text(str(os.getpid()))

    output = run_program(preexec_fn=enter)
    assert output.count(f"of {control_group} is 300.0 MiB, of which ") == 3
