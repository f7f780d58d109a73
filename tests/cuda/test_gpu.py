"""Arrays on real GPUs: `pytest -m gpu`. Two processes may share a GPU.

Tests that do not need a GPU also run on the emulated device, which shows that they are correct before a GPU runs them.
"""

import gc
import os
import signal

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import harness
import ringcomm
from ringcomm import CollectiveTimeout, MismatchError, PeerLost
from ringcomm.bench.machine import gpus
from ringcomm.devices import emulated

GPU = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="no CUDA device")]
LENGTHS = 1, 1000, 20_000, 100_003, 600_001  # for all_reduce on two GPUs, every kernel of it
SHORT = 0.5  # seconds, of a wait that times out


class Emulated:
    """How a test makes and reads arrays and streams."""

    array = staticmethod(emulated.array)
    stream = emulated.Stream
    values = staticmethod(np.asarray)

    def __init__(self, rank):
        pass

    def synchronize(self):
        emulated.device.stream().synchronize()


class CuPy:
    def __init__(self, rank):
        import cupy

        cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
        self.array, self.values = cupy.asarray, cupy.asnumpy
        self.stream = lambda: cupy.cuda.Stream(non_blocking=True)
        self.synchronize = cupy.cuda.runtime.deviceSynchronize


class Torch:
    def __init__(self, rank):
        import torch

        torch.cuda.set_device(rank % torch.cuda.device_count())
        self.array = lambda values: torch.from_numpy(np.ascontiguousarray(values)).cuda()
        self.values = lambda x: x.cpu().numpy()
        self.stream = lambda: torch.cuda.stream(torch.cuda.Stream())
        self.synchronize = torch.cuda.synchronize


def complete(comm, gpu, x, **options):
    """Call all_reduce and wait: a GPU raises failures after the call."""
    comm.all_reduce(x, **options)
    gpu.synchronize()
    comm.check()


def on(*kinds):
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=GPU, id=kind.__name__) for kind in kinds])


on_gpus = on(CuPy, Torch)
everywhere = pytest.mark.parametrize("kind", [Emulated, *on_gpus.args[1]])


def collectives(comm, kind, lengths):
    gpu, rank, size = kind(comm.rank), comm.rank, comm.size
    for length in lengths:
        inputs = np.stack([(np.arange(length) % 61 + r).astype(np.float32) for r in range(size)])
        tables = inputs[:, None] + np.arange(size, dtype=np.float32)[:, None]  # of each rank, a row per rank

        def same(found, expected):
            assert_array_equal(gpu.values(found).reshape(expected.shape), expected)

        def mine(values=inputs):
            return gpu.array(values[rank])

        same(comm.all_reduce(mine()), inputs.sum(0))
        same(comm.all_reduce(mine(), "max"), inputs.max(0))
        same(comm.broadcast(mine(), 1), inputs[1])
        same(comm.all_gather(mine()), inputs)
        same(comm.reduce_scatter(mine(tables)), tables.sum(0)[rank])
        same(comm.all_to_all(mine(tables)), tables[:, rank])
        same(comm.scatter(mine(tables), mine(), root=1), tables[1, rank])
        for found, expected in ((comm.reduce(mine(), root=1), inputs.sum(0)), (comm.gather(mine(), root=1), inputs)):
            assert (found is not None) == (rank == 1)
            if rank == 1:
                same(found, expected)
        out = mine()
        assert comm.sendrecv(mine(), (rank + 1) % size, out, (rank - 1) % size) == (rank - 1) % size
        same(out, inputs[rank - 1])


@everywhere
def test_every_collective_is_correct_at_every_size(kind):
    harness.run(collectives, 2, kind, LENGTHS)


@on_gpus
def test_large_arrays_are_reduced_in_chunks(kind):
    harness.run(collectives, 2, kind, (20_000_003,))


@on(Torch)
@pytest.mark.ranks(2, world="processes")
def test_bfloat16_of_torch_is_reduced(comm, kind):
    import torch

    kind(comm.rank)
    for length in (8, 100_000):
        x = torch.full((length,), comm.rank + 1.5, dtype=torch.bfloat16, device="cuda")
        comm.all_reduce(x)
        assert (x == sum(rank + 1.5 for rank in range(comm.size))).all()


@everywhere
@pytest.mark.ranks(2, world="processes")
def test_calls_on_different_streams_run_one_after_the_other(comm, kind):
    gpu = kind(comm.rank)
    x = gpu.array(np.ones(200_000, np.float32))
    gpu.synchronize()
    works = []
    for _ in range(4):
        with gpu.stream():
            works.append(comm.all_reduce(x, async_op=True))
    for work in works:
        work.wait()
    x += 1  # on the current stream, which waits
    assert_array_equal(gpu.values(x), np.full(200_000, comm.size**4 + 1, np.float32))


def symmetric(comm, kind, length):
    gpu, rank, size = kind(comm.rank), comm.rank, comm.size
    device = "emulated" if kind is Emulated else "cuda"
    x, y = (comm.empty((size, length), "float32", device=device) for _ in range(2))
    inputs = np.stack(
        [(np.arange(size * length) % 61 + r).astype(np.float32).reshape(size, length) for r in range(size)]
    )
    for _ in range(2):  # the second time before any rank has read the results
        x[...] = gpu.array(inputs[rank])
        comm.all_reduce(x, out=y)
        share = comm.reduce_scatter(x)
        moved = comm.all_to_all(x, out=gpu.array(inputs[0] * 0))
        comm.all_gather(x[rank], out=x)
    assert_array_equal(gpu.values(y), inputs.sum(0))
    assert_array_equal(gpu.values(share).reshape(length), inputs.sum(0)[rank])
    assert_array_equal(gpu.values(moved), inputs[:, rank])
    assert_array_equal(gpu.values(x), inputs[range(size), range(size)])
    comm.check()


@pytest.mark.parametrize(
    ("kind", "length"), [(Emulated, 20_000), pytest.param(CuPy, 3_000_001, marks=GPU, id="CuPy-3000001")]
)
def test_symmetric_buffers_are_accessed_directly(kind, length):
    harness.run(symmetric, 2, kind, length)


@everywhere
@pytest.mark.ranks(2, world="processes")
def test_calls_are_ordered_with_the_kernels_of_a_stream(comm, kind):
    gpu = kind(comm.rank)
    x = gpu.array(np.zeros(1_000_000, np.float32))
    gpu.synchronize()
    with gpu.stream():
        for _ in range(5):
            x += 1
            comm.all_reduce(x)
            x /= comm.size
        assert_array_equal(gpu.values(x), np.full(1_000_000, 5, np.float32))


@everywhere
@pytest.mark.ranks(2, world="processes")
def test_a_mismatch_names_the_calls_and_the_group_stays_usable(comm, kind):
    gpu = kind(comm.rank)
    for length, other in ((4, 5), (100_000, 4), (4, 100_000)):
        x = gpu.array(np.ones(other if comm.rank else length))
        with pytest.raises(MismatchError, match=rf"all_reduce\(float64 x {length}, sum\)"):
            complete(comm, gpu, x)
        assert_array_equal(gpu.values(x), np.ones(len(x)))
    assert_array_equal(gpu.values(comm.all_reduce(gpu.array(np.ones(7)))), np.full(7, float(comm.size)))


def late(comm, kind):
    gpu = kind(comm.rank)
    complete(comm, gpu, gpu.array(np.ones(5)))
    if comm.rank:
        with pytest.raises(CollectiveTimeout):
            comm.recv(np.empty(1), 0)  # until its peer has timed out
        return
    with pytest.raises(CollectiveTimeout, match=r"all_reduce.*not called by rank 1"):
        complete(comm, gpu, gpu.array(np.ones(5)), timeout=SHORT)
    with pytest.raises(CollectiveTimeout):
        complete(comm, gpu, gpu.array(np.ones(5)))


@everywhere
def test_a_rank_that_does_not_call_is_named(kind):
    ringcomm.launch(late, 2, args=(kind,), timeout=harness.OPERATION)


def killed(comm, kind):
    gpu = kind(comm.rank)
    complete(comm, gpu, gpu.array(np.ones(5)))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost, match="rank 1") as caught:
        complete(comm, gpu, gpu.array(np.ones(100_000)))
    assert caught.value.rank == 1


@everywhere
def test_a_rank_that_dies_is_named(kind):
    with pytest.raises(PeerLost, match="rank 1"):
        ringcomm.launch(killed, 3 if kind is Emulated else 2, args=(kind,), timeout=harness.OPERATION)


@on(CuPy)
@pytest.mark.ranks(2, world="processes")
def test_a_call_is_captured_in_a_graph_and_replayed(comm, kind):
    import cupy

    gpu = kind(comm.rank)
    other = cupy.ones(3_000_000, cupy.float32)
    gpu.synchronize()
    for length, non_blocking in ((4, True), (1000, False), (5_000_000, True)):
        with cupy.cuda.Stream(non_blocking=non_blocking) as stream:
            x = cupy.ones(length, cupy.float32)
            comm.all_reduce(x)  # its kernel is compiled and loaded
            x.fill(1)
            comm.all_reduce(other)  # in flight while the next one is captured
            stream.begin_capture()
            comm.all_reduce(x)
            graph = stream.end_capture()
            for _ in range(3):
                graph.launch()
        stream.synchronize()
        assert_array_equal(cupy.asnumpy(x), np.full(length, comm.size**3, np.float32))
    comm.check()


@on(CuPy)
@pytest.mark.ranks(2, world="processes")
def test_closed_groups_free_their_device_memory(comm, kind):
    import cupy

    gpu = kind(comm.rank)
    free = []
    for _ in range(4):
        sub = comm.split(0)
        x = sub.empty(1 << 20, np.float32, device="cuda")
        sub.all_reduce(x)
        gpu.synchronize()
        sub.close()
        del x, sub
        gc.collect()
        comm.barrier()
        free.append(cupy.cuda.runtime.memGetInfo()[0])
        comm.barrier()
    assert free[0] - free[-1] < 64 << 20, f"the device loses memory: {free}"  # an arena is larger
