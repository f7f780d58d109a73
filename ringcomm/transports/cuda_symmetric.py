"""Symmetric buffers on GPUs: where each rank has them, so that kernels reach those of the others (symmetric.cuh)."""

import weakref
from typing import NamedTuple

import numpy as np

from ringcomm.devices.contract import Device, Memory
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.shm import ShmTransport

__all__ = ["NOWHERE", "Buffers", "Lent", "Place"]

LINE = 128
TOLD = 32  # buffers that are given back at once: what a rank tells is short


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
    """Memory of this rank, followed by the addresses that it has at all ranks. Raises MemoryError."""

    def __init__(self, device: Device, size: int, ranks: int) -> None:
        self.size = size
        self._table = -(-max(size, 1) // LINE) * LINE
        self.memory = device.allocate(self._table + 8 * ranks)
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

    def allocate(self, words: str, size: int) -> Lent:
        """Make one, and give back those that no rank uses any more. Collective.

        Raises MemoryShortage on all ranks if one has not enough.
        """
        unused = [number for number, buffer in self._buffers.items() if not buffer.used][:TOLD]
        self._made += 1

        def make() -> tuple[str, list[int]]:
            try:
                buffer = self._buffers[self._made] = Buffer(self._device, size, self._talk.size)
            except MemoryError as error:
                raise MemoryError(f"{words} on {self._device.name}: {error}") from error
            return self._device.export(buffer.memory), unused

        said = self._talk.together("all_gather", make)
        buffer = self._buffers[self._made]
        exported = [handle for handle, _ in said]
        self._talk.together("all_gather", lambda: buffer.open(self._device, self._talk.rank, exported))
        lent = buffer.lend()
        self._give_back(set.intersection(*(set(numbers) for _, numbers in said)))
        return lent

    def _give_back(self, numbers: set[int]) -> None:
        """Free these, once no peer has them open."""
        if numbers:
            gone = [self._buffers.pop(number) for number in sorted(numbers)]
            for buffer in gone:
                buffer.opened.clear()
            self._talk.exchange("all_gather", "closed")

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

    def close(self) -> list[Memory]:
        """Close what peers have lent; return what they have open of this rank."""
        for buffer in self._buffers.values():
            buffer.opened.clear()
        own = [buffer.memory for buffer in self._buffers.values()]
        self._buffers.clear()
        return own
