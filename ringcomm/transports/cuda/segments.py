"""Segments, which the allocator of a program takes (bindings/src/cuda/segments.h), as symmetric buffers of a group.

Ranks take segments when they need them, not together. So a rank announces a new one to the others, and a thread of each
rank maps those of its peers: no rank waits for another. The n-th segments of one size that the ranks announce are one
buffer. Until all ranks have mapped it, calls on it take the usual path: the kernels of all ranks agree on that at each
call (kernels/cuda/symmetric.cuh).
"""

import json
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ringcomm.devices.contract import Memory
from ringcomm.devices.device import Device
from ringcomm.devices.gpu import DeviceMemory
from ringcomm.errors import ArgumentError, PeerLost, RingcommError, describe_error, refuse
from ringcomm.machine.threads import start_thread
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.calls import TransferCall
from ringcomm.transports.contract import LocalTransport
from ringcomm.types import DTYPES

__all__ = ["BufferRow", "SharedSegments", "open_segments"]

NOTICE_BYTES = 1024  # of a message about a segment
NEVER = 1e9  # seconds
FIRST_NUMBER = 1 << 63  # of the buffers of segments; those of `empty` have lower ones

log = logging.getLogger("ringcomm")

Key = tuple[int, int]  # of a buffer: its size, and how many of this size there were before


class BufferRow(NamedTuple):
    """A symmetric buffer, as the core finds arrays in it: the fields of rc_gpu_buffer, in their order."""

    begin: int
    size: int
    bases: int
    number: int
    multicast: int = 0
    addresses: Any = NULL  # on all ranks; NULL: these have not mapped it together


class SharedBuffer:
    """The segments of all ranks with one key."""

    def __init__(self) -> None:
        self.handles: dict[int, str] = {}  # by rank, of the ranks that have announced theirs
        self.mapped: list[Memory] = []  # those of all ranks, and the table of their addresses
        self.row: BufferRow | None = None  # once all are mapped


def open_segments(device: Device) -> None:
    """Let the program take segments of a GPU."""
    driver = ffi.new("char[]", device.library.encode())
    check(lib.rc_segments_open(driver, ffi.cast("void *", device.context), device.ordinal, device.by_descriptor))


def segment_of(device: Device, address: int) -> tuple[int, int]:
    """Return address and size of the segment that an address is in. Raises ArgumentError if there is none."""
    found = ffi.new("rc_segment *")
    check(lib.rc_segment_of(address, device.ordinal, found))
    if not found.bytes:
        raise refuse("memory", f"a segment of ringcomm's allocator on {device.name}", f"other memory, at {address:#x}")
    return found.address, found.bytes


class SharedSegments:
    """The segments of one rank of a group of GPUs, and those of its peers, which announce them over `channel`.

    `publish` is called when the rows have changed.
    """

    def __init__(self, device: Device, channel: LocalTransport, publish: Callable[[], None]) -> None:
        self._device, self._channel = device, channel
        self._lock = threading.RLock()  # guards all below, but for the handles, which are the thread's
        self._announced: set[int] = set()  # the addresses of segments
        self._counts: Counter[int] = Counter()  # of the sizes of these
        self._buffers: defaultdict[Key, SharedBuffer] = defaultdict(SharedBuffer)
        self._thread: threading.Thread | None = None
        self._publish: Callable[[], None] | None = publish  # None: closed

    def share(self, addresses: Iterable[int]) -> None:
        """Announce the segments in which these addresses are to all ranks. Waits for no rank.

        Not to be interrupted by a signal handler that closes the group.
        """
        with self._lock:
            for address in addresses:
                begin, size = segment_of(self._device, address)
                if begin not in self._announced:
                    self._announce(begin, size)
            if self._thread is None and self._channel.size > 1:
                self._thread = start_thread("ringcomm segments", self._listen)

    def _announce(self, begin: int, size: int) -> None:
        key = size, self._counts[size]
        handle = self._device.export(DeviceMemory(begin))
        notice = json.dumps([key, handle]).encode().ljust(NOTICE_BYTES)
        if self._channel.size > 1:
            for rank in range(self._channel.size):  # also to itself: only the thread waits for descriptors of peers
                self._channel.transfer(_message(lib.RC_SEND, ffi.from_buffer(notice), rank))
        self._announced.add(begin)
        self._counts[size] += 1
        if self._channel.size == 1:
            self._add(key, 0, handle)

    def rows(self) -> list[BufferRow]:
        """Return the buffers that this rank has mapped."""
        return [buffer.row for buffer in [*self._buffers.values()] if buffer.row]

    def _listen(self) -> None:
        notice = bytearray(NOTICE_BYTES)
        while True:
            try:
                rank = self._channel.transfer(_message(lib.RC_RECV, ffi.from_buffer(notice), -1))
            except (ArgumentError, PeerLost):  # the group is closed here, or on all other ranks
                return
            except RingcommError as error:
                log.warning("no more segments of peers are mapped: %s", error)
                return
            key, handle = json.loads(notice)
            self._add((key[0], key[1]), rank, handle)

    def _add(self, key: Key, rank: int, handle: str) -> None:
        """Take note of a segment; map those of all ranks once all have announced theirs."""
        with self._lock:
            if self._publish is None:
                return
            buffer = self._buffers[key]
        buffer.handles[rank] = handle
        if len(buffer.handles) < self._channel.size:
            return
        try:
            self._map(key, buffer)
        except (OSError, RuntimeError, RingcommError) as error:  # RuntimeError: CUDA's
            buffer.row = None
            if self._publish is not None:  # else closed meanwhile
                log.warning("tensors in a segment of %d bytes are not symmetric: %s", key[0], describe_error(error))

    def _map(self, key: Key, buffer: SharedBuffer) -> None:
        """Map a buffer. A peer may take seconds to send a descriptor, so no lock is held meanwhile."""
        (size, index), ranks = key, range(self._channel.size)
        opened = [self._device.open(buffer.handles[rank]) for rank in ranks]
        table = self._device.allocate(8 * len(ranks), "the table of a symmetric buffer")
        self._device.write(table, 0, np.array([memory.address for memory in opened], np.uint64).tobytes())
        with self._lock:
            if (publish := self._publish) is None:
                return
            # It stays mapped also if `publish` fails: another one may have told the core of it meanwhile.
            buffer.mapped = [*opened, table]
            buffer.row = BufferRow(opened[self._channel.rank].address, size, table.address, _number(size, index))
        publish()

    def close(self) -> None:
        """Close the segments of the peers."""
        with self._lock:
            self._publish = None  # its owner has this object: a cycle would keep the memory of the group
            self._buffers.clear()


def _message(kind: int, data: Any, peer: int) -> TransferCall:
    return TransferCall(kind, data, NOTICE_BYTES, DTYPES["uint8"], peer, 0, NEVER)


def _number(size: int, index: int) -> int:
    """Return the number of a buffer, the same on all ranks."""
    return FIRST_NUMBER | size >> 21 << 20 | index
