"""Segments of an allocator, as torch's takes them, on the emulated device. The ring sums in another order."""

import ctypes
import signal
import threading
from unittest.mock import Mock, patch

import numpy as np
import pytest

import harness
from cases.on_device import Gate
from cases.reference import assert_same, filled, reduced
from harness.failures import until
from harness.leftovers import SEGMENTS
from ringcomm import Aborted, ArgumentError
from ringcomm.devices import emulated
from ringcomm.devices.driver import CudaError
from ringcomm.devices.gpu import DeviceMemory
from ringcomm.native import LIBRARY
from ringcomm.transports.cuda import segments

PAGE = 2 << 20
MANY = 30_000  # elements, enough for the ring

functions = ctypes.CDLL(LIBRARY)  # as torch.cuda.memory.CUDAPluggableAllocator loads it
allocate, free = functions.ringcomm_segment_allocate, functions.ringcomm_segment_free
allocate.argtypes, allocate.restype = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
free.argtypes, free.restype = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p], None


@pytest.fixture(autouse=True, scope="module")
def opened():
    open_here()


def taken(size=PAGE):
    """Take a segment, and return an array over it."""
    address = allocate(size, 0, None)
    SEGMENTS.add(address)
    return emulated.device.array(DeviceMemory(address), (size // 4,), "float32")


def address_of(x):
    return x.ctypes.data


def share(comm, *arrays):
    comm._router.share_segments(emulated.device, map(address_of, arrays))


def buffers(comm):
    return comm._router._group._buffers.segments.rows()


def mapped(comm, count):
    """Wait until all ranks have mapped so many buffers."""
    until(lambda: len(buffers(comm)) == count, f"{count} buffers")
    comm.barrier()


def is_symmetric(comm, x):
    """Return whether an all_reduce of this array is done on the memory of the ranks directly."""
    inputs = [filled(rank, (MANY,), "float32") for rank in range(comm.size)]
    x[:MANY] = inputs[comm.rank]
    ring = comm.all_reduce(emulated.array(inputs[comm.rank]))
    expected = reduced(inputs, "sum")
    assert not np.array_equal(ring, expected)
    comm.all_reduce(x[:MANY])
    if np.array_equal(x[:MANY], expected):
        return True
    assert_same(x[:MANY], ring)
    return False


def open_here():
    segments.open_segments(emulated.device)


@pytest.mark.ranks(3, world="processes")
def test_calls_on_segments_of_all_ranks_copy_nothing_first(comm):
    open_here()
    comm = comm.split(0)
    comm.barrier()
    first = taken()
    assert not is_symmetric(comm, first)
    share(comm, first)
    mapped(comm, 1)
    assert is_symmetric(comm, first)
    second, large = taken(), taken(2 * PAGE)
    share(comm, second[5:], large, first)
    mapped(comm, 3)
    assert is_symmetric(comm, second[8:])
    assert is_symmetric(comm, large)
    assert not is_symmetric(comm, first if comm.rank else second)
    assert not is_symmetric(comm, first[4 * comm.rank :])
    assert comm.empty(4, "int8", device="emulated").sum() == 0  # keeps the buffers of segments
    assert is_symmetric(comm, large)


@pytest.mark.ranks(3, world="processes")
def test_a_rank_shares_segments_without_waiting_for_the_others(comm):
    open_here()
    comm = comm.split(0)
    x = taken()
    comm.all_reduce(emulated.array(np.ones(1)))  # connects
    if comm.rank:
        share(comm, x)  # waits for no rank
    comm.barrier()
    assert not buffers(comm)
    assert not is_symmetric(comm, x)
    if not comm.rank:
        share(comm, x)
    mapped(comm, 1)
    assert is_symmetric(comm, x)


@pytest.mark.ranks(3, world="processes")
def test_a_rank_shares_segments_without_waiting_for_a_peer_that_sends_its_descriptor_late(comm):
    open_here()
    comm = comm.split(0)
    x = taken()
    comm.all_reduce(emulated.array(np.ones(1)))
    if comm.rank:
        share(comm, x)
    comm.barrier()
    answered, opened = threading.Event(), emulated.device.open
    if not comm.rank:

        def open_late(handle):
            assert answered.wait(harness.OPERATION), "a rank that shares waits for a peer"
            return opened(handle)

        with patch.object(emulated.device, "open", open_late):
            share(comm, x)
            share(comm, taken())
            answered.set()
            until(lambda: buffers(comm), "the buffer")
    comm.barrier()
    assert is_symmetric(comm, x)


@pytest.mark.ranks(3, world="processes")
def test_segments_that_a_rank_cannot_map_take_the_usual_path(comm):
    open_here()
    comm = comm.split(0)
    x = taken()
    comm.all_reduce(emulated.array(np.ones(1)))
    emulated.configure(unreachable=comm.rank == 1)
    share(comm, x)
    told = comm._router._group._buffers.segments._buffers
    until(lambda: told and all(len(each.handles) == comm.size for each in [*told.values()]), "what the peers tell")
    until(lambda: len(buffers(comm)) == (comm.rank != 1), "the buffer of the others")
    comm.barrier()
    assert not is_symmetric(comm, x)
    emulated.configure()


@pytest.mark.ranks(3, world="processes")
def test_a_failure_of_one_segment_leaves_later_ones_symmetric(comm):
    open_here()
    comm = comm.split(0)
    first, second = taken(), taken()
    comm.all_reduce(emulated.array(np.ones(1)))
    found = comm._router._group._buffers.segments
    for number, step in enumerate(("write", "_publish"), 1):
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 1:
                fails = Mock(side_effect=RuntimeError("CUDA has failed"))
                patch.setattr(emulated.device if step == "write" else found, step, fails)
            share(comm, taken())
            comm.barrier()
            if comm.rank == 1:
                until(lambda: fails.called, step)  # noqa: B023 (called in this turn)
            else:
                until(lambda: len(buffers(comm)) == number, "the buffer of the others")  # noqa: B023 (called in this turn)
            comm.barrier()
    assert len(buffers(comm)) == (0 if comm.rank == 1 else 2)
    share(comm, first)
    until(lambda: len(buffers(comm)) == (1 if comm.rank == 1 else 3), "a later buffer")
    comm.barrier()
    assert is_symmetric(comm, first)
    found.close()
    found._add((PAGE, 9), 0, "of a peer that has not closed yet")
    assert not found._buffers
    comm.barrier()
    del second


def test_a_group_that_is_closed_before_a_buffer_is_published_says_nothing(caplog):
    def publish():
        shared.close()
        raise ArgumentError("the group is closed")

    device = Mock(**{name: Mock(return_value=Mock(address=PAGE)) for name in ("open", "allocate")})
    shared = segments.SharedSegments(device, Mock(rank=0, size=1), publish)
    shared._add((PAGE, 0), 0, "a handle")
    assert shared._publish is None
    assert caplog.text == ""


@pytest.mark.ranks(2, world="processes", fresh=True)
def test_a_signal_handler_that_closes_does_not_wait_for_the_share_that_it_interrupts(comm):
    open_here()
    export = emulated.device.export

    def interrupted(memory):
        signal.raise_signal(signal.SIGUSR1)
        return export(memory)

    x = taken()
    signal.signal(signal.SIGUSR1, lambda *_: comm.close())
    closed = pytest.raises(Aborted, match="rank 0 was closed by a signal handler")
    with closed:
        comm.all_reduce(emulated.array(np.ones(1)))  # rank 0 may have left it, and close, before rank 1 has
        with patch.object(emulated.device, "export", interrupted):
            share(comm, x) if comm.rank == 0 else comm.recv(emulated.array(np.ones(1)), 0)


def test_a_freed_segment_is_the_next_of_its_size():
    x, other = taken(3 * PAGE), taken(5 * PAGE)
    assert segments.segment_of(emulated.device, address_of(x[7:])) == (address_of(x), 3 * PAGE)
    free(address_of(x), 3 * PAGE, 0, None)
    assert address_of(taken(5 * PAGE)) not in (address_of(x), address_of(other))
    assert address_of(taken(3 * PAGE - 1)) == address_of(x)
    free(address_of(x) + 1, 1, 0, None)  # no segment
    assert address_of(taken(3 * PAGE)) != address_of(x)


def test_memory_in_no_segment_is_refused():
    x = taken(PAGE)
    with pytest.raises(ArgumentError, match=r"expected a segment of ringcomm's allocator on emulated, got other"):
        segments.segment_of(emulated.device, address_of(np.ones(1)))
    assert segments.segment_of(emulated.device, address_of(x) + PAGE - 1)[0] == address_of(x)


def test_a_segment_is_freed_once_the_gpu_has_done_what_is_queued():
    x, stream = taken(7 * PAGE), emulated.Stream()
    gate = Gate()
    gate.hold(stream)
    freeing = threading.Thread(target=free, args=(address_of(x), 7 * PAGE, 0, None))
    freeing.start()
    freeing.join(0.1)
    assert freeing.is_alive()
    gate.open()
    freeing.join(20)
    assert not freeing.is_alive()
    assert address_of(taken(7 * PAGE)) == address_of(x)


def test_a_segment_that_is_freed_while_a_stream_is_captured_is_not_used_again():
    x, stream = taken(11 * PAGE), emulated.Stream()
    with pytest.raises(CudaError, match="INVALIDATED"), emulated.capture(stream):
        free(address_of(x), 11 * PAGE, 0, None)
    assert address_of(taken(11 * PAGE)) != address_of(x)


def test_memory_that_cannot_be_had_is_null():
    assert allocate(1 << 50, 0, None) is None
    assert allocate(1 << 62, 0, None) is None
    assert allocate(0, 0, None) is None
    assert allocate(-1, 0, None) is None
    assert allocate(PAGE, 7, None) is None  # no such GPU
