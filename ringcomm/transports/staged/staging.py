"""Collectives of arrays on a GPU through pinned host memory, in chunks that overlap.

While a chunk is on the wire, the next one is copied to the host and the one before to the GPU. The copies have streams
of their own. A call begins when the GPU has done what the program had queued before it: so the result is not written
before the program has read what was there.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ringcomm.devices.contract import Memory
from ringcomm.devices.device import Device, Event
from ringcomm.errors import Aborted, ArgumentError, MemoryShortage, RingcommError
from ringcomm.machine.threads import OwnedLock
from ringcomm.native import check, ffi, lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.calls import CollectiveCall
from ringcomm.transports.contract import Transport
from ringcomm.transports.deadline import Deadline
from ringcomm.transports.staged.chunks import Chunk, chunk_of
from ringcomm.types import COLLECTIVES, DTYPES, reduction

__all__ = ["Staging"]

# Bytes of a chunk, of all ranks together. A copy of 1 MiB takes some 20 us over PCIe 5.0, several times what it takes
# to queue it; on a link of 100 Gbit/s 1 MiB takes 80 us, several times the latency.
CHUNK_BYTES = 1 << 20
SLOTS = 3  # chunks in pinned memory: one is copied to the host, one is on the wire, one is copied to the GPU
SHORTEST, LONGEST = 20e-6, 200e-6  # seconds between two looks at an event

Divide = Callable[[Any, int], object]  # is called with a result in host memory, and its elements


class Pinned:
    """Pinned host memory that grows."""

    def __init__(self, allocate: Callable[[int], Memory]) -> None:
        self._allocate = allocate
        self._memory: Memory | None = None
        self.size = 0

    def reserve(self, size: int) -> int:
        """Return the address of at least so many unused bytes."""
        if size > self.size:
            self._memory, self.size = None, 0  # freed before more is taken
            self._memory, self.size = self._allocate(size), size
        return self._memory.address if self._memory and size else 0


class Slot:
    """The pinned memory of a chunk, for what is given and what is got."""

    def __init__(self, allocate: Callable[[int], Memory]) -> None:
        self.given, self.got = Pinned(allocate), Pinned(allocate)
        self.event: Event | None = None  # of the last copy that uses this memory


class Staging:
    """The streams and the pinned memory of one communicator on a GPU.

    `stop` raises what has to end a call of this rank, `fail` breaks the group.
    """

    def __init__(
        self, device: Device, rank: int, stop: Callable[[], None], fail: Callable[[RingcommError], None]
    ) -> None:
        self.device, self._rank, self._stop, self._fail = device, rank, stop, fail
        self.stream, self._up = device.new_stream(), device.new_stream()
        self._slots = [Slot(self._allocate_pinned) for _ in range(SLOTS)]
        self._calling = OwnedLock()

    @contextmanager
    def call_after(self, event: Event) -> Iterator[None]:
        """Enter a call, one at a time, once an event is reached."""
        with self.alone(), self.shared_failures():
            self._wait(event, self._stop)
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no call run in the block but one that is made there."""
        if self.called_here():
            raise ArgumentError("a collective was called by a signal handler, in the middle of another call")
        with self._calling:
            yield

    def called_here(self) -> bool:
        """Return whether this thread is in a call: then this is a signal handler in the middle of it."""
        return self._calling.here()

    @contextmanager
    def shared_failures(self) -> Iterator[None]:
        """Let all ranks raise what fails in the block on this one."""
        try:
            yield
        except RingcommError:  # they know it
            raise
        except RuntimeError as error:  # CUDA's
            text = f"{self.device.name} has failed: {error}"
            raise self._failed(RingcommError(text, rank=self._rank)) from error
        except BaseException as interrupt:  # a signal
            text = f"rank {self._rank} was interrupted by a signal ({interrupt!r})"
            self._failed(Aborted(text, rank=self._rank))
            raise

    def _allocate_pinned(self, size: int) -> Memory:
        return self.allocate(lambda: self.device.allocate_pinned(size))

    def allocate(self, make: Callable[[], Memory]) -> Memory:
        """Return memory; let all ranks raise a shortage on this one."""
        try:
            return make()
        except MemoryShortage as error:
            raise self._failed(MemoryShortage(str(error), rank=self._rank)) from error

    def _failed(self, failure: RingcommError) -> RingcommError:
        """Break the group; return its error, which is that of the first rank that has failed."""
        try:
            self._fail(failure)
            self._stop()
        except RingcommError as first:
            return first
        return failure

    def free(self) -> None:
        with self.alone():
            self._slots = [Slot(self._allocate_pinned) for _ in range(SLOTS)]

    def finish(self) -> None:
        """Wait for what is queued on `stream`."""
        self._wait(self.device.record_event(self.stream), self._stop)

    def collective(
        self,
        cpu: Transport,
        name: str,
        call: CollectiveCall,
        timeout: float,
        agreed: bool = False,
        divide: Divide | None = None,
    ) -> None:
        """Do a collective of `cpu` whose arrays are on the GPU. `agreed`: the ranks have compared their calls."""
        blocks = Blockwise(cpu.rank, cpu.size, name, call)
        deadline = Deadline(cpu.timeout if timeout < 0 else timeout)
        number = self._number_of_chunks(cpu, call, blocks, deadline, agreed)
        try:
            later = self._download(blocks, call, 0, number)
            for i in range(number):
                chunk, slot, event = later
                if i + 1 < number:
                    later = self._download(blocks, call, i + 1, number)
                self._stop()
                self._wait(event, self._stop)
                cpu.fused[name](_part(chunk.call) if i + 1 < number else chunk.call, deadline.left())
                if divide and chunk.got:
                    divide(chunk.call.target, chunk.got_bytes // blocks.item)
                self._upload(chunk, slot)
        finally:  # then nothing copies any more
            for slot in self._slots:
                self._wait(slot.event)

    def _number_of_chunks(
        self, cpu: Transport, call: CollectiveCall, blocks: Blockwise, deadline: Deadline, agreed: bool
    ) -> int:
        """Return the number of chunks, the same on all ranks."""
        by_pairs = blocks.recv_rows is not blocks.rows  # each pair of ranks knows its counts only
        elements = max(blocks.joined, sum(blocks.recv_rows) if by_pairs else 0)
        number = max(1, -(-elements * blocks.item // CHUNK_BYTES))
        if not agreed and (number > 1 or by_pairs):
            whole = call._replace(source=ffi.cast("void *", call.source), target=ffi.cast("void *", call.target))
            check(lib.rc_agree_on_gpus(cpu.handle, COLLECTIVES[blocks.name].code, (whole,), deadline.left()))
        if by_pairs:
            most = np.array([number], np.uint64)
            data, dtype, op = ffi.from_buffer(most), DTYPES["uint64"], reduction("max")[0]
            cpu.fused["all_reduce"](_part(CollectiveCall(data, data, 1, dtype, op)), deadline.left())
            number = int(most[0])
        return number

    def _download(self, blocks: Blockwise, call: CollectiveCall, i: int, number: int) -> tuple[Chunk, Slot, Event]:
        slot = self._slots[i % SLOTS]
        self._wait(slot.event)
        chunk = chunk_of(blocks, call, i, number, slot.given.reserve, slot.got.reserve)
        for device, pinned, size in chunk.given:
            self.device.copy(pinned, device, size, self.stream)
        slot.event = event = self.device.record_event(self.stream)
        return chunk, slot, event

    def _upload(self, chunk: Chunk, slot: Slot) -> None:
        for device, pinned, size in chunk.got:
            self.device.copy(device, pinned, size, self._up)
        slot.event = self.device.record_event(self._up)

    def _wait(self, event: Event | None, stop: Callable[[], None] | None = None) -> None:
        pause = SHORTEST
        while event and not event.reached():
            if stop:
                stop()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)


def _part(call: CollectiveCall) -> CollectiveCall:
    """Return a call that leaves the mismatch of an earlier one to the last part: the other ranks make that too."""
    return call._replace(deferred_mismatch=ffi.new("int32_t *"))
