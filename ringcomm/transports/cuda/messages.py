"""Messages of arrays on a GPU: the memory of a rank for them, and their handles.

The core matches and launches them (bindings/src/p2p/gpu.h). No other rank takes part when this is made: a receiver
opens the memory of a sender at the first message from it.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from ringcomm.arrays.adapters import GPU_ARRAYS
from ringcomm.callbacks import when_done
from ringcomm.devices.contract import Memory
from ringcomm.devices.device import Device
from ringcomm.devices.gpu import process
from ringcomm.errors import ArgumentError, RingcommError, refuse
from ringcomm.native import GpuMessage, check, ffi, lib
from ringcomm.transports.calls import Pending, Startable, TransferCall
from ringcomm.transports.contract import Transport

__all__ = ["GpuMessages", "PendingMessage"]

CLOSE_TIMEOUT = 2.0  # seconds in which the peers read what was sent
LOOK = 1e-4  # seconds between two looks at that

log = logging.getLogger("ringcomm")
_kept: list[Memory] = []  # that peers may still read when their communicator is closed here
# Arenas that peers have read, but may have mapped until they close too: CUDA leaves undefined what freeing one does.
# The next communicators use them. By device and size.
_spare: dict[tuple[str, int], list[Memory]] = {}


class GpuMessages:
    """One rank's GPU in the messages of a communicator."""

    def __init__(self, cpu: Transport, device: Device) -> None:
        self._cpu, self._device = cpu, device
        shape = {"ranks": cpu.size, **device.message_shape._asdict()}
        size = ffi.new("uint64_t *")
        check(lib.rc_gpu_messages_bytes([shape], size))
        self._size = int(size[0])
        self._arena = self._allocate()
        self._all_read = False  # by the peers
        self._control = device.allocate_pinned(ffi.sizeof("rc_cuda_control"))
        self._completed = device.allocate_pinned(8 * lib.RC_MAX_LAUNCHES)
        driver, name = ffi.new("char[]", device.library.encode()), ffi.new("char[]", device.name.encode())
        setup = {
            "shape": shape,
            "arena": ffi.cast("void *", self._arena.address),
            "control": ffi.cast("void *", self._control.address),
            "completed": ffi.cast("uint64_t *", self._completed.address),
            "function": ffi.cast("void *", device.message_kernel()),
            "context": ffi.cast("void *", device.context),
            "process": int(process(), 16),
            "driver": driver,
            "device": name,
            "ordinal": device.ordinal,
            "threads": device.threads,
        }
        check(lib.rc_gpu_messages_open(cpu.handle, [setup]))
        self._comm = int(ffi.cast("uintptr_t", cpu.handle))
        if not device.blocking:
            cpu.fast_path.connect_messages(GPU_ARRAYS[device.family], device.ordinal, PendingMessage)

    def _allocate(self) -> Memory:
        try:
            arena = _spare[self._device.name, self._size].pop()
        except (KeyError, IndexError):
            return self._device.allocate_ipc(self._size, "the arena of messages of a rank")
        self._device.clear(arena, self._size)
        return arena

    def start(self, transfer: TransferCall, async_op: bool) -> Pending:
        """Start a send or receive after what is queued on the current stream."""
        device = transfer.data.device
        if device.name != self._device.name:
            raise refuse("array", f"one on {self._device.name}, as the first of this communicator", device.name)
        owner = self._comm, self._cpu.handle, check, lambda _: device.stream(), device.ordinal, device.blocking
        message: Startable = PendingMessage(*owner, *transfer._replace(data=transfer.data.address))
        return message.start(async_op)

    def coalesce(self, begins: bool) -> None:
        """Launch together what is started until a call with False, or a wait."""
        check(lib.rc_gpu_messages_coalesce(self._cpu.handle, begins))

    def finish(self) -> None:
        """Wait until what has been launched has moved."""
        check(lib.rc_gpu_messages_wait(self._cpu.handle))

    def close(self) -> RingcommError | None:
        """Before the communicator closes: wait until what has been launched has moved, and the peers have read what was
        sent. Return why a message has not moved, unless the communicator had failed before.
        """
        failure = None
        with suppress(RingcommError):
            self._cpu.check()
            try:
                self.finish()
                self._cpu.check()  # the progress thread may have noticed first
            except ArgumentError:  # from a signal handler
                pass
            except RingcommError as error:
                failure = error
        read, end = ffi.new("int *"), time.monotonic() + CLOSE_TIMEOUT
        with suppress(RingcommError):  # it has failed
            while not lib.rc_gpu_messages_read(self._cpu.handle, read) and not read[0]:
                self._cpu.check()
                if time.monotonic() > end:
                    break
                time.sleep(LOOK)
        self._all_read = bool(read[0])
        return failure

    def free(self) -> None:
        """After the communicator has closed: free the arena, unless peers may have it mapped."""
        if self._all_read:
            _spare.setdefault((self._device.name, self._size), []).append(self._arena)
        else:
            _kept.append(self._arena)
            text = "rank %d keeps %d bytes of %s until it ends: not all messages were received"
            log.warning(text, self._cpu.rank, self._size, self._device.name)


class PendingMessage(GpuMessage):  # type: ignore[misc]  # GpuMessage is in C++
    """A send or receive (ringcomm.transports.calls.Startable).

    `wait` waits until the message is matched, and lets the current stream wait for its end; where calls are blocking,
    it waits for that too.
    """

    __slots__ = ()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        when_done(ffi.cast("rc_work *", self.address), callback)
