"""What the transport asks of a device, and how arrays tell where they are."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

__all__ = ["Device", "Event", "Memory", "Pointer", "Shape"]


class Shape(NamedTuple):
    """How large things are in the arena of a rank (kernels/cuda/arena.cuh). All ranks have the same."""

    channels: int  # blocks of a launch, at most: all of them run at the same time
    slots: int
    slot_bytes: int
    stage_bytes: int
    line_bytes: int


class Memory(Protocol):
    """Memory that lives as long as this."""

    address: int


class Event(Protocol):
    """A place in a stream: reached when all that was queued before it is done."""

    @property
    def done(self) -> bool: ...


class Device(Protocol):
    """One rank's view of the device that its arrays are on. A stream is a queue of launches."""

    name: str
    shape: Shape
    outlives: bool  # whether what others have opened lives on when its owner frees it
    blocking: bool  # whether programs expect a call to be done when it returns, as with NumPy arrays

    def stream(self) -> Any:
        """Return the stream that is current for the calling thread."""

    def new_stream(self) -> Any:
        """Return one that waits for nothing that a program has queued."""

    def record(self, stream: Any) -> Event: ...

    def wait(self, stream: Any, event: Event) -> None:
        """Let what is queued on a stream from now on wait for an event, perhaps of another stream."""

    def capturing(self) -> bool:
        """Say whether launches on the current stream are only recorded, to be replayed later."""

    def watch(self) -> None:
        """Let the calling thread look at events while other threads capture."""

    def allocate(self, size: int, what: str) -> Memory:
        """Return memory of zeros that other processes can open. Raises MemoryShortage, which says for `what`."""

    def export(self, memory: Memory) -> str:
        """Return what others need to open it."""

    def open(self, exported: str) -> Memory: ...

    def shared_with_host(self, size: int) -> Memory:
        """Return zeros in host memory, at the same address for kernels."""

    def write(self, memory: Memory, offset: int, data: bytes) -> None:
        """Write from the host; it is there when this returns."""

    def clear(self, memory: Memory, size: int) -> None:
        """Write zeros; they are there when this returns."""

    def download(self, address: int, target: Any) -> None:
        """Copy to a NumPy array, after what is queued on the current stream; it is there when this returns."""

    def upload(self, source: Any, address: int) -> None:
        """Copy from a NumPy array, after what is queued on the current stream; it is there when this returns."""

    def prepare(self, kernel: int, dtype: int, op: int) -> None:
        """Compile and load a kernel of kernels/cuda/kernels.cuh."""

    def launch(self, kernel: int, dtype: int, op: int, args: Any, blocks: int, stream: Any) -> None:
        """Queue a prepared kernel; `args` are what rc_cuda_args has written."""

    def launch_virtual(
        self, kernel: int, dtype: int, op: int, args: Memory, ranks: int, blocks: int, stream: Any
    ) -> None:
        """Queue one launch of a prepared kernel for several ranks, all on this device; `args` holds those of all.

        Raises ArgumentError if not all blocks can run at the same time.
        """

    def array(self, memory: Memory, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array over memory that keeps it alive."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where an array lies on a device."""

    device: Device
    address: int
