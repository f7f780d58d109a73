"""Symmetric buffers on GPUs, which every rank has mapped (kernels/cuda/symmetric.cuh)."""

import threading
import weakref
from collections import Counter
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ringcomm.devices.contract import Memory
from ringcomm.devices.device import Device
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.contract import LocalTransport
from ringcomm.transports.cuda.segments import BufferRow, SharedSegments

__all__ = ["NOT_SYMMETRIC", "BufferLease", "BufferLocation", "DeviceBuffers"]

LINE = 128
MAX_RELEASED = 32  # buffers that a rank releases at once, so that their numbers fit into one exchange


class BufferLocation(NamedTuple):
    """The location of an array in a symmetric buffer (rc_cuda_location)."""

    bases: int
    buffer: int
    offset: int


NOT_SYMMETRIC = BufferLocation(0, 0, 0)


class BufferLease:
    """A buffer as its arrays keep it alive. When the leases of all ranks are gone, the buffer is freed."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.address = memory.address


class DeviceBuffer:
    """Memory of this rank, followed by the addresses of the buffer on all ranks. Raises MemoryShortage."""

    def __init__(self, device: Device, size: int, ranks: int, description: str) -> None:
        self.size = size
        self._table = -(-max(size, 1) // LINE) * LINE
        self.memory = device.allocate(self._table + 8 * ranks, description)
        self.bases = self.memory.address + self._table
        self.opened: list[Memory] = []
        self.addresses: Any = NULL  # of these, in C
        self._lease: weakref.ref[BufferLease] | None = None

    def open(self, device: Device, rank: int, handles: list[str]) -> None:
        """Open the buffers of all ranks. Raises OSError or RuntimeError, as the driver does."""
        self.opened = [self.memory if each == rank else device.open(handle) for each, handle in enumerate(handles)]
        addresses = np.array([memory.address for memory in self.opened], np.uint64)
        device.write(self.memory, self._table, addresses.tobytes())
        self.addresses = ffi.new("uint64_t[]", addresses.tolist())

    def lease(self) -> BufferLease:
        lease = BufferLease(self.memory)
        self._lease = weakref.ref(lease)
        return lease

    @property
    def used(self) -> bool:
        return self._lease is not None and self._lease() is not None


class DeviceBuffers:
    """The symmetric buffers of a group of GPUs, an rc_gpus. Its ranks exchange handles over `channel`."""

    def __init__(self, device: Device, channel: LocalTransport, gpus: Any) -> None:
        self._device, self._channel, self._gpus = device, channel, gpus
        self._publishing = threading.Lock()
        self.segments = SharedSegments(device, channel, self._publish)
        self._made = 0
        self._buffers: dict[int, DeviceBuffer] = {}
        self._released: set[int] = set()  # by this rank
        self._releases: Counter[int] = Counter()  # of how many ranks

    def allocate(self, description: str, size: int) -> BufferLease:
        """Free the buffers that no rank uses any more, and make one. Collective.

        Raises MemoryShortage on all ranks if one has not enough.
        """
        self._free_unused()
        self._made += 1

        def make() -> str:
            buffer = DeviceBuffer(self._device, size, self._channel.size, description)
            made.append(buffer)
            return self._device.export(buffer.memory)

        made: list[DeviceBuffer] = []
        handles = self._channel.run_on_all("all_gather", make)
        (buffer,) = made
        self._buffers[self._made] = buffer
        self._channel.run_on_all("all_gather", lambda: buffer.open(self._device, self._channel.rank, handles))
        self._publish()
        return buffer.lease()

    def _free_unused(self) -> None:
        """Free the buffers that all ranks have released, once no peer has them open."""
        unused = (number for number, buffer in self._buffers.items() if not buffer.used)
        releasing = [*islice((number for number in unused if number not in self._released), MAX_RELEASED)]
        self._released.update(releasing)
        for numbers in self._channel.all_gather_facts("all_gather", releasing):
            self._releases.update(numbers)
        numbers = sorted(number for number, ranks in self._releases.items() if ranks == self._channel.size)
        if numbers:
            for number in numbers:
                self._buffers[number].opened.clear()
            self._channel.all_gather_facts("all_gather", "closed")
            for number in numbers:
                del self._buffers[number], self._releases[number]
            self._released.difference_update(numbers)
            self._publish()

    def _publish(self) -> None:
        """Tell the core, which finds the arrays of a call in them."""
        with self._publishing:
            rows = self.segments.rows()
            for number, buffer in [*self._buffers.items()]:
                begin, size, bases = buffer.memory.address, buffer.size, buffer.bases
                rows.append(BufferRow(begin, size, bases, number, addresses=buffer.addresses))
            check(lib.rc_gpus_set_buffers(self._gpus, rows, len(rows)))

    def own(self) -> list[DeviceBuffer]:
        """Return this rank's buffers, which peers may have open."""
        return [*self._buffers.values()]

    def close(self) -> None:
        """Close the buffers of the peers."""
        for buffer in self._buffers.values():
            buffer.opened.clear()
        self._buffers = {}
        self.segments.close()
