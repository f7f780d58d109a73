"""Arrays on GPUs, tested on the emulated device: the same kernels, launches and failures."""

import gc
import threading
import weakref
from itertools import product

import numpy as np
import pytest

import harness
import ringcomm
from cases.collectives import PLANS, pairwise, start
from cases.on_device import Gate, OnDevice, behind_a_gate, mappings
from cases.reference import assert_same, filled, numpy_dtype, reduced
from harness.failures import until
from ringcomm import ArgumentError, Communicator, MismatchError, RingcommError, premul_sum
from ringcomm.devices import emulated
from ringcomm.devices.contract import KernelVariant
from ringcomm.devices.gpu import Gpu
from ringcomm.testing import connect_threads, run_threads
from ringcomm.transports import shm
from ringcomm.transports.cuda import deferred_free
from ringcomm.types import ON_GPUS

AXES = {
    "collective": [name for name in PLANS if name in ON_GPUS],
    "length": [(0, 0), (0, 1), (0, 7), (1, 3), (9, 5)],
    "row": [(), (3,)],
    "place": ["default", "out", "in place"],
    "async_op": [False, True],
    "root": [0, 1, -1],
    "counts": ["none", "even", "uneven", "zeros"],
    "offset": [0, 1, 8],
}
EXACT = [  # independent of the order of the sum, in which the ring differs from the loop over ranks
    {**AXES, "dtype": ["bool", "int8", "int64"], "op": ["sum"]},
    {**AXES, "dtype": ["bfloat16", "float32"], "op": ["max"]},
]
SEGMENT = 1024  # so short and long arrays use different kernels
SHORT = 0.3  # seconds, of a wait that times out


def check_cases(comm, cases):
    for case in cases:
        start(comm, case, SEGMENT, OnDevice(case.offset))()


@pytest.mark.parametrize("axes", EXACT, ids=["sum", "max"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_of_threads_are_exact(size, axes):
    harness.run(check_cases, size, pairwise(axes, seed=size), world="threads")


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_processes_are_exact(size):
    harness.run(check_cases, size, pairwise(EXACT[0], seed=10 + size), world="processes")


@pytest.mark.parametrize("axes", EXACT, ids=["sum", "max"])
@pytest.mark.usefixtures("no_peer_access")
def test_devices_without_peer_access_use_host_memory(axes, caplog):
    harness.run(check_cases, 3, pairwise(axes, seed=20), world="threads")
    assert "emulated of rank 0 does not reach all others: peer access is not supported" in caplog.text


def test_the_device_is_told_how_many_ranks_share_it_and_the_least_multiprocessors(monkeypatch):
    told, multiprocessors = [], iter([132, 7, 66])
    monkeypatch.setattr(emulated.EmulatedDevice, "shape_for", lambda device, *given: told.append(given) or device.shape)
    monkeypatch.setattr(Gpu, "multiprocessors", property(lambda _: next(multiprocessors)), raising=False)
    ranks = [Communicator(end) for end in connect_threads(shm.connect, 3)]
    run_threads(lambda comm: comm.all_reduce(emulated.array(np.ones(3))), ranks)
    assert told == [(3, 7)] * 3


@pytest.mark.ranks(3)
def test_all_reduce_below_the_ring_threshold_has_the_bits_of_the_cpu(comm):
    shape = emulated.device.shape
    dtypes, ops = ("float16", "bfloat16", "float32", "complex64"), ("sum", "avg", "prod", premul_sum(0.3))
    for size in (16, shape.line_bytes + 16, shape.channels * shape.stage_bytes, 4 * shape.channels * shape.stage_bytes):
        for dtype, op in product(dtypes, ops):
            inputs = [filled(rank, (size // numpy_dtype(dtype).itemsize,), dtype) for rank in range(comm.size)]
            x = emulated.array(inputs[comm.rank])
            assert_same(comm.all_reduce(x, op), reduced(inputs, op), f"{size} B {dtype} {op}")


@pytest.mark.ranks(3)
def test_point_to_point_between_devices_and_host_memory(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for length in (0, 1, 300_001):
        x, out = emulated.array(np.arange(length) + comm.rank), emulated.empty(length, np.int64)
        host = np.empty(length, np.int64)
        work = comm.send(x, right, async_op=True)
        assert comm.recv(out, left) == left
        work.wait()
        assert_same(out, np.arange(length) + left)
        assert comm.sendrecv(x, right, host, left) == left  # host memory on one side
        assert_same(host, np.arange(length) + left)
        receive = comm.recv(out, None, tag=3, async_op=True)
        comm.send(host, right, tag=3)
        assert receive.wait() == left
        assert_same(out, np.arange(length) + (left - 1) % comm.size)
        comm.barrier()


@pytest.mark.ranks(3)
def test_empty_allocates_on_the_device(comm):
    x = comm.empty((3, 5), "float32", device="emulated")
    assert isinstance(x, emulated.Array)
    assert_same(x, np.zeros((3, 5), np.float32))
    x += comm.rank + 1
    comm.all_reduce(x)
    assert_same(x, np.full((3, 5), comm.size * (comm.size + 1) / 2, np.float32))
    with pytest.raises(MismatchError, match="emulated"):
        comm.empty(comm.rank, "int8", device="emulated")
    with pytest.raises(ArgumentError, match="cuda, emulated"):
        comm.empty(1, "int8", device="gpu")


@pytest.mark.ranks(4)
def test_invalid_arrays_are_refused_and_subgroups_work(comm):
    x, host = emulated.array(np.ones(5)), np.empty(5)
    with pytest.raises(ArgumentError, match="emulated"):
        comm.all_reduce(x, out=host)
    with pytest.raises(ArgumentError, match="complex"):
        comm.all_reduce(emulated.array(np.ones(2, complex)), "max")
    assert comm.all_reduce(x) is x
    assert_same(x, np.full(5, float(comm.size)))
    group = comm.split(comm.rank % 2)
    assert_same(group.all_reduce(x), np.full(5, float(comm.size * group.size)))
    group.close()
    assert_same(comm.all_reduce(host * 0 + 1, premul_sum(2)), np.full(5, 2.0 * comm.size))
    comm.barrier()


@pytest.mark.ranks(3)
def test_a_call_runs_after_the_work_queued_on_its_stream(comm):
    x = emulated.array(np.zeros(10_000))
    stream, gate = emulated.Stream(), Gate()
    gate.hold(stream)
    stream.add(lambda: x.fill(comm.rank))  # a kernel of the program
    with stream:
        work = comm.all_reduce(x, async_op=True)
    assert not work.done()
    gate.open()
    work.synchronize()
    assert work.done()
    assert_same(x, np.full(10_000, sum(range(comm.size)), float))


@pytest.mark.usefixtures("streams_as_on_a_gpu")
@pytest.mark.ranks(3, world="threads")
def test_calls_return_after_their_launch_and_synchronize_waits(comm):
    comm.all_reduce(emulated.array(np.ones(1)))  # connects the GPUs
    x = emulated.array(np.ones(10_000))
    gate = Gate()
    with emulated.Stream() as stream:
        gate.hold(stream)
        stream.add(lambda: x.fill(comm.rank))
        assert comm.all_reduce(x) is x
        work = comm.all_gather(x[:1000], async_op=True)
        assert work.wait().shape == (comm.size, 1000)
        assert not work.done()
        y = comm.all_gather(x[:1000])
        gate.open()
        result = work.synchronize()
    assert work.done()
    assert_same(result, np.full((comm.size, 1000), sum(range(comm.size)), float))
    stream.synchronize()
    assert_same(y, result)


@pytest.mark.ranks(3, world="processes")
def test_closed_groups_free_their_memory(comm):
    gc.collect()
    before = mappings()
    for _ in range(10):
        with comm.split(0) as group:
            group.all_reduce(emulated.array(np.ones(5)))
            until(lambda: mappings() == before + comm.size, "those before are freed")


@pytest.mark.ranks(2, world="processes")
def test_a_closed_group_frees_its_memory_while_its_object_lives(comm):
    gc.collect()
    before, blocking = mappings(), emulated.EmulatedDevice.blocking
    emulated.EmulatedDevice.blocking = False
    try:
        group, x = comm.split(0), emulated.array(np.ones(5))
        group.all_reduce(x)
        group.synchronize()
        group.close()
        gc.collect()
        until(lambda: mappings() == before, "its memory is freed")
    finally:
        emulated.EmulatedDevice.blocking = blocking


@pytest.mark.usefixtures("streams_as_on_a_gpu")
@pytest.mark.ranks(2, world="threads")
def test_a_barrier_waits_for_all_launches(comm):
    work, gate = behind_a_gate(comm)
    threading.Timer(SHORT, gate.open).start()
    comm.barrier()
    assert work.done()


@pytest.fixture
def lost_writes(monkeypatch):
    """Lose writes to the memory of peers, as an IOMMU can."""
    monkeypatch.setattr(emulated.EmulatedDevice, "open", lambda device, _: device.allocate(1 << 20, "memory"))
    monkeypatch.setattr("ringcomm.transports.cuda.group.PROBE", SHORT)


def sums(comm):
    for _ in range(2):
        assert_same(comm.all_reduce(emulated.array(np.ones(5))), np.full(5, float(comm.size)))


@pytest.mark.usefixtures("lost_writes")
def test_devices_whose_writes_do_not_arrive_use_host_memory(caplog):
    harness.run(sums, 2, world="threads")
    assert "no answer from rank 1 within 0.3 s" in caplog.text


def closed_in_another_order(comm):
    """Rank 0 closes the first group before rank 1 may; no rank waits for another."""
    first, second = comm.split(0), comm.split(0)
    for group in (first, second):
        group.all_reduce(emulated.array(np.ones(5)))
    arena = weakref.ref(first._router._group._arena.memory)
    if comm.rank == 0:
        first.close()
        assert arena() is not None  # rank 1 has it mapped
        comm.send(np.ones(1), 1)
        second.close()
    else:
        second.close()
        comm.recv(np.empty(1), 0)
        first.close()
    del group, first, second
    until(lambda: gc.collect() >= 0 and arena() is None, "the arena is freed")


def test_ranks_close_in_any_order_and_free_what_no_peer_has_mapped(monkeypatch, caplog):
    monkeypatch.setattr(deferred_free, "_kept", kept := [])
    harness.run(closed_in_another_order, 2, world="threads")
    assert not kept
    assert "keeps" not in caplog.text


def kept(comm):
    """Rank 1 closes when rank 0 no longer waits for that."""
    comm.all_reduce(emulated.array(np.ones(5)))
    if comm.rank == 0:
        comm.close()
    until(lambda: deferred_free._kept, "rank 0 keeps its arena")


def test_an_arena_that_a_peer_may_still_use_is_kept(monkeypatch, caplog):
    monkeypatch.setattr(deferred_free, "_kept", memories := [])
    run_threads(kept, [Communicator(end) for end in connect_threads(shm.connect, 2, timeout=SHORT)])
    until(lambda: len(memories) == 2, "rank 1 keeps its arena")
    assert "rank 0 keeps" in caplog.text


def probing_a_gpu_that_fails(comm):
    """The GPU of rank 0 fails before the kernel with which the GPUs connect, and runs nothing more."""
    device, gate = emulated.device, Gate()

    def failing(device):
        stream = emulated.Stream()
        gate.hold(stream)
        device.launch_virtual(KernelVariant(0, 0, 0), bytes(4096), 1, 1, stream)
        threading.Timer(SHORT, gate.open).start()
        return stream

    if comm.rank == 0:
        emulated.EmulatedDevice.new_stream = failing
    with pytest.raises(RingcommError, match=f"{device.name} has failed: CUDA_ERROR_LAUNCH_FAILED"):
        comm.all_reduce(emulated.array(np.ones(5)))
    raise RingcommError("as expected")


def test_a_gpu_that_fails_while_the_ranks_connect_is_a_failure_on_all_ranks():
    with pytest.raises(RingcommError, match="as expected"):
        ringcomm.launch(probing_a_gpu_that_fails, 2, world="processes", timeout=harness.OPERATION)
