"""Shared arrays: NumPy's arrays in memory that all ranks access, valid in every collective and as long as they live."""

import contextvars
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from test_symmetric import shared_bytes

import harness
from cases import PLANS, Arrays, Symmetric, pairwise, start
from reference import assert_same
from ringcomm import Aborted, ArgumentError, Communicator, Config
from ringcomm.machine import memory
from ringcomm.testing import CHECKS, connect_threads, run_threads
from ringcomm.transports import network, shared_arrays

KIB, MIB = 1 << 10, 1 << 20
LEAST = 64 * KIB
AXES = {
    "collective": list(PLANS),
    "length": [(0, 0), (0, 1), (0, 7), (1, 5)],
    "dtype": ["int8", "float32", "complex128"],
    "place": ["default", "out", "in place"],
    "async_op": [False, True],
    "root": [0, -1],
    "counts": ["none", "even", "uneven", "zeros"],
    "offset": [0, 1, 64],
}
MIXTURES = {
    "all": lambda rank: 0,
    "all but one": lambda rank: None if rank == 1 else 0,
    "at different places": lambda rank: 64 * rank,
}

get_handler_name = (np.core if np.__version__ < "2" else np._core).multiarray.get_handler_name


def is_shared(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    address = array.ctypes.data
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return "/memfd:ringcomm" in line
    return False


# --- Values -----------------------------------------------------------------------------------------------------------


def check(comm, cases, segment, mixture):
    place = MIXTURES[mixture](comm.rank)
    with comm.shared_arrays():
        buffer = np.empty(64 * segment, np.uint8)
    assert is_shared(buffer)
    for case in cases:
        arrays = Arrays(case.offset) if place is None else Symmetric(buffer, case.offset + place)
        start(comm, case, segment, arrays)()


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_on_shared_arrays_are_exact(size, mixture, world):
    harness.run(check, size, pairwise(AXES, seed=size), Config().segment_bytes, mixture, world=world)


def keep_the_contract(comm, name):
    check = next(check for check in CHECKS if check.__name__ == name)
    with comm.split(0, key=-comm.rank) as group, group.shared_arrays():
        check(group)
    comm.barrier()  # also if the check has broken its group


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_the_contract_holds_inside_the_block(name, size, world):
    harness.run(keep_the_contract, size, name, world=world)


def take_the_direct_path(comm):
    with comm.shared_arrays():
        x = np.full(MIB, comm.rank + 1.0)
        skipped = np.empty(100 * KIB * comm.rank + LEAST, np.uint8)  # arrays lie elsewhere on each rank
        y = np.full(MIB, comm.rank + 1.0)
        gathered = comm.all_gather(y)
    assert is_shared(skipped)
    for array in (x, y[5:-5], gathered[comm.rank]):
        comm.all_reduce(array, "max")
        assert comm._transport.path()[0] == "symmetric"
        assert (array == comm.size).all()
    comm.all_reduce(gathered)
    assert comm._transport.path()[0] == "symmetric"
    assert is_shared(gathered)
    private = np.ones(MIB) if comm.rank == 0 else x
    comm.all_gather(private)
    assert comm._transport.path()[0] != "symmetric"


@pytest.mark.parametrize("size", [2, 3])
def test_peers_access_shared_arrays_wherever_they_lie(size, world):
    harness.run(take_the_direct_path, size, world=world)


def in_a_group(comm):
    group = comm.split(comm.rank % 2)
    with group.shared_arrays():
        x = np.full(MIB, comm.rank)
    for used in (comm, group):
        x[:] = 1
        used.all_reduce(x)
        assert (x == used.size).all()
        assert used._transport.path()[0] == "symmetric"
    group.close()
    with comm.shared_arrays():
        y = np.ones(MIB)
    comm.all_reduce(y)
    comm.all_reduce(x)


def test_all_groups_of_a_world_reach_an_array(world):
    harness.run(in_a_group, 4, world=world)


# --- What is shared ---------------------------------------------------------------------------------------------------


def in_the_block(comm):
    before = get_handler_name()
    with comm.shared_arrays():
        assert get_handler_name() == "ringcomm.shared_arrays"
        assert is_shared(np.empty(LEAST, np.uint8))
        assert not is_shared(np.empty(LEAST - 1, np.uint8))
        assert is_shared(np.zeros((300, 300)).T + 1)
        assert is_shared(np.ones(LEAST).astype("int32"))
        assert is_shared(np.empty(40 * MIB + 1, np.uint8))  # more than a step of the heap, and no whole pages
    assert get_handler_name() == before
    assert not is_shared(np.empty(LEAST, np.uint8))
    with pytest.raises(ZeroDivisionError), comm.shared_arrays():
        1 / 0  # noqa: B018
    assert get_handler_name() == before


def test_large_arrays_made_in_the_block_are_shared(world):
    harness.run(in_the_block, 2, world=world)


def nested(comm):
    group = comm.split(0)
    before = get_handler_name()
    first, second, third = comm.shared_arrays(), group.shared_arrays(), comm.shared_arrays()
    for enter, leave in (("123", "321"), ("123", "123"), ("123", "213"), ("121", "121"), ("11", "11")):
        blocks = {"1": first, "2": second, "3": third}
        for name in enter:
            blocks[name].__enter__()
        for name in leave:
            assert is_shared(np.empty(LEAST, np.uint8))
            blocks[name].__exit__(None, None, None)
        assert get_handler_name() == before
        assert not is_shared(np.empty(LEAST, np.uint8))


def test_blocks_may_be_nested_and_end_in_any_order(world):
    harness.run(nested, 2, world=world)


def in_contexts(comm):
    names = []

    def look():
        names.append(get_handler_name())

    with comm.shared_arrays():
        thread = threading.Thread(target=look, context=None) if sys.version_info >= (3, 14) else None
        thread = thread or threading.Thread(target=look)
        thread.start()
        thread.join()
        contextvars.Context().run(look)
        contextvars.copy_context().run(look)
    look()
    assert names[1:] == ["default_allocator", "ringcomm.shared_arrays", "default_allocator"]
    block = comm.shared_arrays()
    contextvars.copy_context().run(block.__enter__)
    block.__exit__(None, None, None)  # it began in another context
    assert get_handler_name() == "default_allocator"


def test_a_block_is_that_of_its_context(world):
    harness.run(in_contexts, 1, world=world)


# --- Memory -----------------------------------------------------------------------------------------------------------


def reused(comm):
    with comm.shared_arrays():
        for turn in range(50):
            size = LEAST + turn * 10_000
            x = np.empty(size, np.uint8)
            x.fill(255)
            del x
            assert not np.zeros(size, np.uint8).any()
        x = np.arange(20_000)
        for length in (30_000, 29_000, 9_000, 100, 9_000, 100_000):
            kept = x[: min(len(x), length)].copy()
            x.resize(length, refcheck=False)
            assert_same(x[: len(kept)], kept)
            assert not x[len(kept) :].any()
            x[:] = np.arange(length)
    x.resize(200_000, refcheck=False)  # outside, still by the handler that has made it
    assert is_shared(x)
    assert_same(x[:100_000], np.arange(100_000))


def test_reused_memory_is_zero_and_resized_arrays_keep_their_values(world):
    harness.run(reused, 2, world=world)


def given_back(comm):
    gc.collect()
    comm.barrier()
    before = shared_bytes()
    comm.barrier()
    with comm.shared_arrays():
        large = [np.ones(32 * MIB, np.uint8) for _ in range(6)]
    comm.barrier()
    assert shared_bytes() - before >= comm.size * (192 - 65) * MIB  # that much may have been kept
    comm.barrier()
    del large
    comm.barrier()
    assert shared_bytes() - before <= comm.size * 65 * MIB
    with comm.shared_arrays():
        for _ in range(200):
            np.ones(MIB)
    comm.barrier()
    assert shared_bytes() - before <= comm.size * 65 * MIB
    comm.barrier()


def test_freed_arrays_give_their_memory_back(world):
    harness.run(given_back, 2, world=world)


def short(comm, limit):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("ringcomm").addHandler(handler)
    start = shared_bytes()
    patched = pytest.MonkeyPatch()
    patched.setattr(shared_arrays, "_warned", False)
    patched.setattr(memory, "available", lambda: memory.Headroom(max(0, limit - (shared_bytes() - start)), "a test"))
    try:
        with comm.shared_arrays():
            arrays = [np.full(8 * MIB, turn, np.uint8) for turn in range(12)]
            shared = [is_shared(array) for array in arrays]
            assert sum(shared) == limit // (8 * MIB)
            assert shared == sorted(shared, reverse=True)
            for turn, array in enumerate(arrays):
                assert (array == turn).all()
            del arrays[:4], array
            assert is_shared(np.empty(16 * MIB, np.uint8))  # from what is free
            del arrays
            assert is_shared(np.empty(limit - MIB, np.uint8))  # after the free blocks were given back
    finally:
        patched.undo()
        logging.getLogger("ringcomm").removeHandler(handler)
    (warning,) = [record.getMessage() for record in records]
    assert "8.0 MiB" in warning
    assert "a test" in warning


def test_arrays_are_private_with_one_warning_while_memory_is_short():
    harness.run(short, 1, 40 * MIB, world="threads")


LIMITED = """
import logging, resource, sys
import numpy as np
import ringcomm

if sys.argv[1] == "before":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
logging.basicConfig(format="%(message)s")
comm = ringcomm.init()
with comm.shared_arrays():
    x = np.full(1 << 20, comm.rank)
symmetric = comm.empty(100_000, "int64")
comm.all_reduce(x)
comm.all_reduce(symmetric)
assert (x == 1).all()
"""


def test_a_limit_on_the_size_of_files_leaves_arrays_private(tmp_path):
    (tmp_path / "program.py").write_text(LIMITED)
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "2", sys.executable, str(tmp_path / "program.py")]
    for when, warnings in (("before", 2), ("never", 0)):
        run = subprocess.run([*command, when], capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stderr
        assert run.stderr.count("RLIMIT_FSIZE") == warnings, run.stderr


def interrupted(comm):
    interrupts = []

    def raise_interrupt():
        if not interrupts:
            return memory.UNKNOWN
        raise interrupts.pop()

    patched = pytest.MonkeyPatch()
    patched.setattr(memory, "available", raise_interrupt)
    patched.setattr(shared_arrays, "_warned", True)
    try:
        with comm.split(0) as group, group.shared_arrays():
            interrupts.append(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                raise AssertionError(is_shared(np.empty(200 * MIB, np.uint8)))
            assert not interrupts
    finally:
        patched.undo()


def test_an_interrupt_while_memory_is_looked_at_is_raised():
    harness.run(interrupted, 1)


def between_hosts(comm):
    with comm.shared_arrays():
        x = np.full(MIB, comm.rank + 1)
    assert is_shared(x)
    comm.all_reduce(x)
    assert (x == comm.size * (comm.size + 1) // 2).all()
    local = comm._transport._host._local
    assert local.size == 2 - (comm.rank == 2)
    assert local.path()[0] in ("symmetric", "single")


def test_the_ranks_of_a_host_share_arrays_also_in_a_group_of_several():
    def connect(rank, size, store, config):
        return network.connect(rank, size, store, replace(config, host_id="001"[rank], link="sockets"))

    run_threads(between_hosts, [Communicator(end) for end in connect_threads(connect, 3)])


# --- How long ---------------------------------------------------------------------------------------------------------


def outlive(comm):
    group = comm.split(0)
    with group.shared_arrays() as nothing:
        x, y = np.full(MIB, 3), np.full(MIB, 4)
        result = group.all_gather(x)
    assert nothing is None
    group.close()
    with pytest.raises(ArgumentError, match="closed"), group.shared_arrays():
        pass
    x += y
    del y
    assert (x == 7).all()
    assert (result == 3).all()
    return x


def test_an_array_outlives_the_block_and_the_communicator(world):
    for result in harness.run(outlive, 2, world=world):
        assert (result == 7).all()


PROGRAM = """
import atexit, sys
import numpy as np
import ringcomm

comm = ringcomm.init()
order = sys.argv[1 + comm.rank]
if order == "block":
    comm.shared_arrays().__enter__()
with comm.shared_arrays():
    x, y = np.ones(1 << 20), np.ones(1 << 20)
comm.all_reduce(x)
assert (x == comm.size).all()
if order == "communicator":
    del comm
elif order == "array":
    del x
elif order == "close":
    comm.close()
elif order == "module":
    sys.modules["kept"] = x, y
elif order == "atexit":
    atexit.register(lambda: print((x + y).sum() and "", end=""))
elif order == "cycle":
    cycle = [x, comm]
    cycle.append(cycle)
    del x, comm, cycle
print("done")
"""


@pytest.mark.slow
def test_processes_exit_with_arrays_in_any_order(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    orders = ["block", "communicator", "array", "close", "module", "atexit", "cycle"]  # one for each rank
    command = [sys.executable, "-m", "ringcomm", "run", "-n", str(len(orders)), str(tmp_path / "program.py"), *orders]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("done") == len(orders)
    assert not run.stderr


def forked(comm):
    with comm.shared_arrays():
        x, y = np.full(MIB, 1), np.full(MIB, 2)
        comm.barrier()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                del y
                gc.collect()
                assert not is_shared(np.full(MIB, 3))
                grown = np.ones(1)
                grown.resize(MIB, refcheck=False)
                assert (x == 1).all()
                x[0] = 5  # as in the parent: it is the same memory
                with pytest.raises(ArgumentError, match="fork"), comm.shared_arrays():
                    pass
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert x[0] == 5
        assert (y == 2).all()
        z = np.full(MIB, 4)
    comm.all_reduce(z)
    assert (z == 4 * comm.size).all()
    assert (y == 2).all()


def test_a_forked_child_sees_the_arrays_and_frees_none():
    harness.run(forked, 2)


def reused_after_failure(comm):
    group = comm.split(0)
    with group.shared_arrays():
        x = np.ones(MIB)
        group.all_reduce(x)
        if comm.rank == 0:
            group.abort("a test")
        with pytest.raises(Aborted):
            group.barrier(timeout=harness.OPERATION)
        del x
        y = np.ones(MIB)
        comm.all_reduce(y)
        assert comm._transport.path()[0] == "symmetric"
        assert (y == comm.size).all()


def test_memory_is_usable_after_a_failure(world):
    harness.run(reused_after_failure, 3, world=world)


def fail_at_the_start_of_access(comm):
    """Ranks 0 and 1 find the failure when they begin their access; rank 0, whose array rank 1 reads, after rank 1."""
    group = comm.split(0)
    pids = comm.all_gather(np.array([os.getpid()])).ravel()
    with group.shared_arrays():
        x = np.ones(MIB)
    private = np.ones(MIB)
    group.broadcast(x if comm.rank == 0 else private, root=0)
    assert group._transport.path()[0] == "symmetric"
    if comm.rank < 2:
        with pytest.raises(Aborted):
            group.broadcast(x if comm.rank == 0 else private, root=0)
        if comm.rank == 1:
            comm.send(x[:1], 2)
    else:
        await_report(group, "waits for rank 2", times=2)
        for pid in pids[:2]:
            os.kill(pid, signal.SIGSTOP)
        try:
            work = group.broadcast(private, root=0, async_op=True)
            await_report(group, "waits for rank 0", times=1)
            group.abort("a test")
            os.kill(pids[1], signal.SIGCONT)
            comm.recv(x[:1], 1)
        finally:
            for pid in pids[:2]:
                os.kill(pid, signal.SIGCONT)
        with pytest.raises(Aborted):
            work.wait()
    comm.barrier()


def await_report(comm, text, times):
    deadline = time.monotonic() + harness.OPERATION
    while comm._transport.report(1).count(text) < times:
        assert time.monotonic() < deadline, comm._transport.report(1)
        time.sleep(0.001)


def test_a_rank_whose_access_fails_at_once_holds_up_no_other():
    harness.run(fail_at_the_start_of_access, 3)


UNMAPPED = """
import pathlib, resource, sys, time
import numpy as np
import ringcomm

left = pathlib.Path(sys.argv[1])
comm = ringcomm.init()
with comm.shared_arrays():
    x = np.ones(1 << 20)
comm.barrier()
try:
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, limit))
        comm.recv(x, 0)
except ringcomm.RingcommError as error:
    print(error)
if comm.rank == 0:
    left.touch()
else:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
end = time.monotonic() + 20
while not left.exists() and time.monotonic() < end:
    time.sleep(0.01)
print("left" if left.exists() else "held up")
"""


def test_a_sender_leaves_if_the_receiver_cannot_map_its_array(tmp_path):
    (tmp_path / "program.py").write_text(UNMAPPED)
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "2", sys.executable, str(tmp_path / "program.py")]
    run = subprocess.run([*command, str(tmp_path / "left")], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout.count("mapping") == run.stdout.count("left") == 2, run.stdout + run.stderr
