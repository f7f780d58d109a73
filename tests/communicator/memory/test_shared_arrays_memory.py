"""Shared arrays: where their memory comes from, how long they live, and what failures leave of them."""

import gc
import logging
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from test_shared_arrays import LEAST, MIB, is_shared
from test_symmetric import shared_bytes

import harness
from cases.reference import assert_same
from harness.jobs import run_job
from ringcomm import Aborted, ArgumentError, Communicator
from ringcomm.machine import memory
from ringcomm.testing import connect_threads, run_threads
from ringcomm.transports import network, shared_arrays

# --- Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_reused_memory_is_zero_and_resized_arrays_keep_their_values(comm):
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


@pytest.mark.ranks(2)
def test_freed_arrays_give_their_memory_back(comm):
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


@pytest.mark.ranks(1, world="threads")
def test_arrays_are_private_with_one_warning_while_memory_is_short(comm):
    limit, records = 40 * MIB, []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("ringcomm").addHandler(handler)
    start = shared_bytes()
    patched = pytest.MonkeyPatch()
    patched.setattr(shared_arrays, "_warned", set())
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
    for when, warnings in (("before", 2), ("never", 0)):
        run = run_job(tmp_path, 2, LIMITED, when)
        assert run.stderr.count("RLIMIT_FSIZE") == warnings, run.stderr


def between_hosts(comm):
    with comm.shared_arrays():
        x = np.full(MIB, comm.rank + 1)
    assert is_shared(x)
    comm.all_reduce(x)
    assert (x == comm.size * (comm.size + 1) // 2).all()
    local = comm._transport._local
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
    orders = ["block", "communicator", "array", "close", "module", "atexit", "cycle"]  # one for each rank
    run = run_job(tmp_path, len(orders), PROGRAM, *orders)
    assert run.stdout.count("done") == len(orders)
    assert not run.stderr


@pytest.mark.ranks(2, world="processes")
def test_a_forked_child_sees_the_arrays_and_frees_none(comm):
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


@pytest.mark.ranks(3)
def test_memory_is_usable_after_a_failure(comm):
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


@pytest.mark.ranks(3, world="processes")
def test_a_rank_whose_access_fails_at_once_holds_up_no_other(comm):
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
    run = run_job(tmp_path, 2, UNMAPPED, tmp_path / "left")
    assert run.stdout.count("mapping") == run.stdout.count("left") == 2, run.stdout + run.stderr
