"""Memory of the emulated GPU that peers map by file descriptors, not by handles of cudaIpc."""

import errno
import os
import resource
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import pytest

import harness
from cases.on_device import mappings
from cases.reference import assert_same, filled, reduced
from harness.failures import until
from ringcomm import MemoryShortage, RingcommError
from ringcomm.bootstrap.wire import unix
from ringcomm.devices import descriptors, emulated
from ringcomm.devices.gpu import Gpu
from ringcomm.native import ffi, lib
from ringcomm.transports.cuda import segments

PAGE = 2 << 20
MANY = 30_000  # elements, enough for the ring


def by_descriptor():
    return patch.object(emulated.EmulatedDevice, "by_descriptor", True)


def without_ipc(gpu, name, *arguments, create=Gpu._create):
    assert name != "cuIpcOpenMemHandle_v2"
    return create(gpu, name, *arguments)


@pytest.mark.ranks(3, world="processes", fresh=True)
def test_ranks_share_memory_by_descriptors(comm):
    inputs = [filled(rank, (MANY,), "float32") for rank in range(comm.size)]
    expected = reduced(inputs, "sum")
    with by_descriptor(), patch.object(Gpu, "_create", without_ipc):
        ring = comm.all_reduce(emulated.array(inputs[comm.rank]))
        x = comm.empty(MANY, "float32", device="emulated")
        x[:] = inputs[comm.rank]
        assert_same(comm.all_reduce(x), expected)  # on symmetric memory
        assert not np.array_equal(ring, expected)
        assert comm._router.name == "shm+cuda_vmm"
        segments.open_segments(emulated.device)
        address = int(ffi.cast("uintptr_t", lib.rc_segment_allocate(PAGE, 0)))
        comm._router.share_segments(emulated.device, [address])
        rows = comm._router._group._buffers.segments.rows
        until(rows, "the buffer of the segments")
        comm.barrier()
        y = emulated.device.array(emulated.DeviceMemory(address), (MANY,), "float32")
        y[:] = inputs[comm.rank]
        assert_same(comm.all_reduce(y), expected)


@pytest.mark.ranks(2, world="processes", fresh=True)
def test_messages_keep_handles_of_cuda_ipc(comm):
    with by_descriptor():
        x, out = emulated.array(np.arange(5.0) + comm.rank), emulated.array(np.zeros(5))
        work = comm.send(x, 1 - comm.rank, async_op=True)
        comm.recv(out, 1 - comm.rank)
        work.wait()
        assert_same(out, np.arange(5.0) + 1 - comm.rank)


@pytest.mark.ranks(2, world="processes", fresh=True)
def test_memory_that_cannot_be_mapped_is_left_to_host_memory(comm):
    emulated.configure(unreachable=comm.rank == 1)
    with by_descriptor():
        assert_same(comm.all_reduce(emulated.array(np.ones(3))), np.full(3, 2.0))
        assert comm._router._group is None


@pytest.mark.ranks(1, world="processes")
def test_memory_lives_as_long_as_it_is_open(comm):  # noqa: ARG001
    before = mappings()
    with by_descriptor():
        memory = emulated.device.allocate(PAGE + 1, "memory")
        assert mappings() == before + 1
        handle = emulated.device.export(memory).split()[3]
    gpu = emulated.device.gpu
    opened = descriptors.open_exported(gpu._names, handle)
    assert opened != memory.address
    array = lambda address: emulated.device.array(emulated.DeviceMemory(address), (9,), "int8")  # noqa: E731
    array(memory.address)[:] = 5
    assert array(opened).tolist() == [5] * 9
    del memory
    with pytest.raises(OSError, match="sends no descriptor"):
        descriptors.open_exported(gpu._names, handle)
    array(opened)[:] = 6
    assert array(opened).sum() == 54
    descriptors.close(opened)
    assert mappings() == before


@pytest.mark.ranks(1, world="processes")
def test_the_name_of_freed_memory_opens_no_other(comm):  # noqa: ARG001
    with by_descriptor():
        memory = emulated.device.allocate(PAGE, "memory")
        handle = emulated.device.export(memory).split()[3]
        assert emulated.device.export(memory).split()[3] == handle
        del memory
        assert not descriptors._server._names
        assert not descriptors._server._addresses
        other = emulated.device.allocate(PAGE, "memory")  # at the same address
    with pytest.raises(OSError, match="sends no descriptor"):
        descriptors.open_exported(emulated.device.gpu._names, handle)
    del other


class Failing:
    """A listener whose first accept fails, as that of a process with too many open files."""

    def __init__(self, listener):
        self._listener, self._failed = listener, False

    def accept(self):
        if self._failed:
            return self._listener.accept()
        self._failed = True
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def out_of_descriptors(_):
    with by_descriptor():
        memory = emulated.device.allocate(1, "memory")
        handle = emulated.device.export(memory).split()[3]
    server, gpu = descriptors._server, emulated.device.gpu
    server._listener = Failing(server._listener)
    with patch.object(descriptors.log, "warning") as warning:
        for _ in range(2):  # the first is accepted as before
            descriptors.close(descriptors.open_exported(gpu._names, handle))
    assert "Too many open files" in str(warning.call_args[0])


def test_a_process_that_was_out_of_descriptors_answers_afterwards():
    harness.run(out_of_descriptors, 1)


def silent(_):
    with by_descriptor(), patch.object(descriptors, "SECONDS", 1.0), ExitStack() as stack:
        memory = emulated.device.allocate(1, "memory")
        handle = emulated.device.export(memory).split()[3]
        address = "\0" + handle.partition(":")[0]
        for _ in range(2):  # one after the other they would take longer than a peer waits
            stack.enter_context(unix.connect(address, 1.0, unix.DescriptorSocket))
        descriptors.close(descriptors.open_exported(emulated.device.gpu._names, handle))


def test_peers_that_send_nothing_delay_no_other():
    harness.run(silent, 1)


def refused(_):
    server, other_user = descriptors._DescriptorServer(), (1, os.geteuid() + 1)
    with (
        patch.object(descriptors, "credentials", return_value=other_user),
        patch.object(descriptors, "start_thread") as start_thread,
        unix.connect(server._address, harness.OPERATION, unix.DescriptorSocket) as peer,
    ):
        assert peer.recv(1) == b""
        start_thread.assert_not_called()


def test_a_process_of_another_user_costs_no_thread():
    harness.run(refused, 1)


@pytest.mark.ranks(2, world="processes")
def test_a_process_that_can_take_no_descriptor_says_so(comm):
    with by_descriptor():
        memory = emulated.device.allocate(1, "memory") if comm.rank == 0 else None
        handle = comm.broadcast_object(memory and emulated.device.export(memory).split()[3])
    if comm.rank:
        usual, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, usual[1]))  # for the connection
        try:
            with pytest.raises(OSError, match="this process can take no more file descriptors"):
                descriptors.open_exported(emulated.device.gpu._names, handle)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    comm.barrier()


def test_a_server_that_cannot_be_trusted_is_an_oserror():
    refused = RingcommError("refused to connect: process 7 belongs to user 1")
    with patch.object(descriptors, "connect", side_effect=refused), pytest.raises(OSError, match="belongs to user 1"):
        descriptors.open_exported(emulated.device.gpu._names, "server:00:1")


@pytest.mark.ranks(1, world="processes")
def test_a_name_that_was_not_exported_gets_nothing(comm):  # noqa: ARG001
    with by_descriptor():
        memory = emulated.device.allocate(1, "memory")
        server, name, size = emulated.device.export(memory).split()[3].split(":")
    wrong = f"{int(name, 16) ^ 1:032x}"
    with pytest.raises(OSError, match="sends no descriptor"):
        descriptors.open_exported(emulated.device.gpu._names, f"{server}:{wrong}:{size}")


def test_a_shortage_names_what_there_was_no_memory_for():
    with by_descriptor(), pytest.raises(MemoryShortage, match=r"a lot on emulated: cuMem.*: CUDA_ERROR_OUT_OF_MEMORY"):
        emulated.device.allocate(1 << 50, "a lot")
