"""Symmetric buffers on GPUs: where each rank has them, so that kernels reach those of the others (symmetric.cuh)."""

import weakref
from collections import Counter
from itertools import islice
from typing import NamedTuple

import numpy as np

from ringcomm.devices.contract import Device, Memory
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.shm import ShmTransport

__all__ = ["NOWHERE", "Buffers", "Lent", "Place"]

LINE = 128
TOLD = 32  # buffers that a rank says at once it has no use for any more


class Place(NamedTuple):
    """Where an array lies in a symmetric buffer (rc_cuda_place)."""

    bases: int
    buffer: int
    offset: int


NOWHERE = Place(0, 0, 0)


class Lent:
    """A buffer as its arrays keep it: once those of all ranks are gone it is given back."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.address = memory.address


class Buffer:
    """Memory of this rank, followed by the addresses that it has at all ranks. Raises MemoryShortage."""

    def __init__(self, device: Device, size: int, ranks: int, words: str) -> None:
        self.size = size
        self._table = -(-max(size, 1) // LINE) * LINE
        self.memory = device.allocate(self._table + 8 * ranks, words)
        self.bases = self.memory.address + self._table
        self.opened: list[Memory] = []
        self._lent: weakref.ref[Lent] | None = None

    def open(self, device: Device, rank: int, exported: list[str]) -> None:
        """Open those of all ranks. Raises OSError or RuntimeError, as CuPy does."""
        self.opened = [self.memory if each == rank else device.open(handle) for each, handle in enumerate(exported)]
        addresses = np.array([memory.address for memory in self.opened], np.uint64)
        device.write(self.memory, self._table, addresses.tobytes())

    def lend(self) -> Lent:
        lent = Lent(self.memory)
        self._lent = weakref.ref(lent)
        return lent

    @property
    def used(self) -> bool:
        return self._lent is not None and self._lent() is not None


class Buffers:
    """The symmetric buffers of a group of GPUs. In `talk` its ranks tell each other where they are."""

    def __init__(self, device: Device, talk: ShmTransport) -> None:
        self._device, self._talk = device, talk
        self._made = 0
        self._buffers: dict[int, Buffer] = {}
        self._told: set[int] = set()  # of which this rank has said that it has no use for them
        self._unused: Counter[int] = Counter()  # how many ranks have said so

    def allocate(self, words: str, size: int) -> Lent:
        """Give back those that no rank uses any more, and make one. Collective.

        Raises MemoryShortage on all ranks if one has not enough.
        """
        self._give_back()
        self._made += 1

        def make() -> str:
            buffer = Buffer(self._device, size, self._talk.size, words)
            made.append(buffer)
            return self._device.export(buffer.memory)

        made: list[Buffer] = []
        exported = self._talk.together("all_gather", make)
        (buffer,) = made
        self._buffers = {**self._buffers, self._made: buffer}  # a new one: other threads look into it
        self._talk.together("all_gather", lambda: buffer.open(self._device, self._talk.rank, exported))
        return buffer.lend()

    def _give_back(self) -> None:
        """Free those that all ranks have said they have no use for, once no peer has them open."""
        unused = (number for number, buffer in self._buffers.items() if not buffer.used and number not in self._told)
        telling = [*islice(unused, TOLD)]
        self._told.update(telling)
        for numbers in self._talk.exchange("all_gather", telling):
            self._unused.update(numbers)
        numbers = sorted(number for number, ranks in self._unused.items() if ranks == self._talk.size)
        if numbers:
            for number in numbers:
                self._buffers[number].opened.clear()
            self._talk.exchange("all_gather", "closed")
            self._buffers = {number: buffer for number, buffer in self._buffers.items() if number not in numbers}
            self._told.difference_update(numbers)
            for number in numbers:
                del self._unused[number]

    def places(self, call: Blockwise, source: int, target: int) -> tuple[Place, Place]:
        """Return in which of them the arrays of a call lie."""
        if not self._buffers:
            return NOWHERE, NOWHERE
        gives, gets = call.counts()
        return self._find(source, gives * call.item), self._find(target, gets * call.item)

    def _find(self, address: int, size: int) -> Place:
        for number, buffer in self._buffers.items():
            offset = address - buffer.memory.address
            if offset >= 0 and offset + size <= buffer.size:
                return Place(buffer.bases, number, offset)
        return NOWHERE

    def own(self) -> list[Buffer]:
        """Return those whose memory peers may have open."""
        return [*self._buffers.values()]

    def close(self) -> None:
        """Close what peers have lent."""
        for buffer in self._buffers.values():
            buffer.opened.clear()
        self._buffers = {}
