"""Ranks under MPI keep the contract of a transport for every distribution over hosts."""

import threading
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest

import harness
import ringcomm
from cases.gpu_messages import every_call
from cases.reference import assert_same, numpy_dtype, reduced
from harness import mpi_world
from harness.failures import check_usable, raised
from ringcomm import ArgumentError, Config, MemoryShortage, MismatchError, RingcommError, premul_sum
from ringcomm.devices import emulated
from ringcomm.testing import check_rank

pytestmark = pytest.mark.mpi


def keep_the_contract(comm):
    check_rank(lambda: comm.split(0))


@pytest.mark.parametrize("layout", ["012", pytest.param("0011", marks=pytest.mark.exhaustive)])
def test_the_contract_is_kept_where_one_thread_at_a_time_may_call_mpi(layout):
    mpi_world.run(keep_the_contract, layout, level="serialized")


def start_where_one_thread_may_call_mpi(world):
    for layout in ("0011", "0000"):
        config = Config(timeout=harness.OPERATION, host_id=layout[world.rank])
        if layout == "0011":
            error = raised(ArgumentError, lambda config=config: ringcomm.init(config=config, mpi_comm=world))
            text = "MPI runs at a thread level below MPI_THREAD_SERIALIZED: set MPI4PY_RC_THREAD_LEVEL=multiple"
            assert str(error) == f"{text} (ranks 0-3)"
        else:
            with ringcomm.init(config=config, mpi_comm=world) as comm:
                check_usable(comm)


@pytest.mark.parametrize("level", ["single", pytest.param("funneled", marks=pytest.mark.exhaustive)])
def test_hosts_are_connected_only_where_threads_may_call_mpi(level):
    mpi_world.call(start_where_one_thread_may_call_mpi, level=level)


# --- Groups -----------------------------------------------------------------------------------------------------------


def names_of_groups(comm):
    """Return the transports of the world and of four splits: pairs, even and odd ranks, all ranks, single ranks."""
    groups = [comm.split(color, key=-comm.rank) for color in (comm.rank // 2, comm.rank % 2, 0, comm.rank)]
    names = [comm._router.name]
    for group in groups:
        check_usable(group)
        names.append(group._router.name)
        group.close()
    return names


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("0123", [["mpi"] * 4 + ["shm"]] * 4),
        ("0011", [["shm+mpi", "shm", "mpi", "shm+mpi", "shm"]] * 4),
        ("0101", [["shm+mpi", "mpi", "shm", "shm+mpi", "shm"]] * 4),
        ("0001", [["shm+mpi", "shm" if rank < 2 else "mpi", "mpi" if rank % 2 else "shm", "shm+mpi", "shm"]
                  for rank in range(4)]),
        ("0000", [["shm"] * 5] * 4),
    ],
)  # fmt: skip
def test_a_group_selects_its_transport_by_the_hosts_of_its_ranks(layout, expected):
    assert mpi_world.run(names_of_groups, layout) == expected


@pytest.mark.parametrize(("library", "layout", "times"), [("openmpi", "0011", 100), ("mpich", "0123", 100)])
@mpi_world.on()
def test_many_groups_can_be_created_and_closed(comm, times):
    threads = threading.active_count()
    for number in range(times):
        with comm.split(0, key=-comm.rank) as group:
            if number % 50 == 0:
                check_usable(group)
    assert threading.active_count() == threads
    check_usable(comm)


def chosen(comm):
    comm.all_reduce(np.ones(10_000))
    return comm._transport.path()[0]


def test_the_configured_algorithm_is_used():
    assert mpi_world.run(chosen, "012", algorithm="recursive_doubling") == ["recursive_doubling"] * 3
    assert mpi_world.run(chosen, "0101", algorithm="halving_doubling") == ["halving_doubling"] * 4


@mpi_world.on("0011")
def test_arrays_on_devices_of_several_hosts_go_through_host_memory(comm):
    """Sum and gather arrays on the emulated device. A group on one host uses kernels."""
    group = comm.split(comm.rank // 2)
    for each in (comm, group):
        x = emulated.array(np.full(10_000, each.rank + 1.0))
        each.all_reduce(x)
        assert (x == each.size * (each.size + 1) / 2).all()
        rows = each.all_gather(x[:3], async_op=True).wait()
        assert isinstance(rows, emulated.Array)
        assert rows.shape == (each.size, 3)
    names = comm._router.name, group._router.name
    group.close()
    assert names == ("shm+mpi", "shm+cuda_ipc")


OPS = [("float32", "sum"), ("float64", "avg"), ("bfloat16", "max"), ("int32", "prod"), ("float64", premul_sum(0.5))]


def sums_on_devices(comm, reachable):
    """Return the largest fraction of a large array that was copied to the host."""
    most = 0.0
    copy, open_ = emulated.EmulatedDevice.copy, emulated.EmulatedDevice.open

    def watched(device, target, source, length, stream):
        nonlocal most
        if size > 10_000 and stream is comm._router._staged._staging[device.name].stream:
            most = max(most, length / size)
        copy(device, target, source, length, stream)

    def reach(device, exported):
        if comm.rank not in reachable:
            raise OSError("peer access is not supported")
        return open_(device, exported)

    with patch.multiple(emulated.EmulatedDevice, copy=watched, open=reach):
        for length, (dtype, op) in product((0, 1, 7, 30_001), OPS):
            inputs = [np.arange(length).astype(numpy_dtype(dtype)) % (rank + 3) for rank in range(comm.size)]
            expected = reduced(inputs, op)
            size = max(1, inputs[0].nbytes)
            for place, asynchronous in (("in", False), ("out", True)):
                x = emulated.array(inputs[comm.rank])
                out = x if place == "in" else emulated.empty(length, x.dtype)
                done = comm.all_reduce(x, op, out=out, async_op=asynchronous)
                assert_same(done.wait() if asynchronous else done, expected, f"{length} {dtype} {op} {place}")
                if place == "out":
                    assert_same(x, inputs[comm.rank])
        on_gpus = len(reachable) == comm.size
        for odd in (emulated.array(np.ones(6)), np.ones(5))[: 1 + on_gpus]:
            text = r"ranks? 1.*: all_reduce\(float64 x 5, sum\)" + " on GPUs" * on_gpus
            with pytest.raises(MismatchError, match=text):
                comm.all_reduce(emulated.array(np.ones(5)) if comm.rank else odd)
        assert_same(comm.all_reduce(emulated.array(np.ones(5))), np.full(5, float(comm.size)))
    return most


@pytest.mark.parametrize(
    ("library", "hosts", "reachable", "most"),
    [
        ("openmpi", "0011", "0123", [0.5] * 4),
        ("mpich", "0101", "0123", [0.5] * 4),
        ("openmpi", "0001", "0123", [1, 0, 0, 1]),  # one rail, whose ranks hold the whole array
        ("openmpi", "0011", "01", [1] * 4),
    ],
)
def test_hosts_exchange_the_sums_of_their_gpus(library, hosts, reachable, most):
    found = mpi_world.run(sums_on_devices, hosts, [*map(int, reachable)], library=library)
    assert [round(each, 2) for each in found] == most


def test_messages_of_gpus():
    mpi_world.run(every_call, "001")


@mpi_world.on("0011")
def test_a_gpu_without_memory_for_its_arena_raises_on_all_hosts(comm):
    allocate = emulated.EmulatedDevice.allocate

    def short(device, size, what):
        if comm.rank == 3:
            raise MemoryShortage(f"{what}: no more")
        return allocate(device, size, what)

    x = emulated.array(np.ones(100))
    with patch.object(emulated.EmulatedDevice, "allocate", short), pytest.raises(MemoryShortage, match="no more"):
        comm.all_reduce(x)
    assert_same(comm.all_reduce(x), np.full(100, float(comm.size)))


@mpi_world.on("0011")
def test_a_gpu_that_fails_on_one_host_is_named_on_all(comm):
    comm.all_reduce(emulated.array(np.ones(5)))
    copy = emulated.EmulatedDevice.copy

    def broken(device, *call):
        if comm.rank == 2:
            raise RuntimeError("an illegal memory access was encountered")
        copy(device, *call)

    with patch.object(emulated.EmulatedDevice, "copy", broken):
        for _ in range(2):
            with pytest.raises(RingcommError, match="emulated has failed: an illegal memory access"):
                comm.all_reduce(emulated.array(np.ones(1000)))
