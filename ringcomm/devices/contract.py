"""What the transport needs of a device, and the pointer that names an array on one."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

__all__ = ["Device", "Event", "KernelVariant", "Memory", "Pointer", "Shape"]


class Shape(NamedTuple):
    """Sizes in the arena of a rank (kernels/cuda/arena.cuh), the same on all ranks."""

    channels: int  # blocks of a launch, at most: all of them run concurrently
    slots: int
    slot_bytes: int
    stage_bytes: int
    line_bytes: int


class KernelVariant(NamedTuple):
    """A kernel of kernels/cuda/kernels.cuh, compiled for one dtype and operation: their numbers."""

    kernel: int
    dtype: int
    op: int


class Memory(Protocol):
    """Memory that lives as long as this object."""

    address: int


class Event(Protocol):
    """A point in a stream: reached when everything queued before it has ended."""

    @property
    def done(self) -> bool: ...

    @property
    def time(self) -> int:
        """Return when it was reached, in ns of time.monotonic_ns(), if it was recorded as `timed` and is done."""


class Device(Protocol):
    """One rank's view of the device that holds its arrays. A stream is a queue of launches."""

    name: str
    shape: Shape
    memory_outlives_owner: bool  # whether memory that peers have opened stays valid when its owner frees it
    blocking: bool  # whether calls return only when they are done, as with NumPy arrays

    def stream(self) -> Any:
        """Return the current stream of the calling thread."""

    def new_stream(self) -> Any:
        """Return a stream that waits for nothing the program has queued."""

    def record(self, stream: Any, timed: bool = False) -> Event: ...

    def wait(self, stream: Any, event: Event) -> None:
        """Let later launches on a stream wait for an event, also of another stream."""

    def capturing(self) -> bool:
        """Return whether launches on the current stream are captured into a graph, to be replayed later."""

    def exempt_from_capture(self) -> None:
        """Let the calling thread query events while other threads capture."""

    def allocate(self, size: int, what: str) -> Memory:
        """Return zeroed memory that other processes can open. Raises MemoryShortage, which names `what`."""

    def allocate_pinned(self, size: int) -> Memory:
        """Return zeroed host memory that kernels access at the same address."""

    def export(self, memory: Memory) -> str:
        """Return a handle with which peers open the memory."""

    def open(self, handle: str) -> Memory: ...

    def write(self, memory: Memory, offset: int, data: bytes) -> None:
        """Write from the host; return when the data is there."""

    def clear(self, memory: Memory, size: int) -> None:
        """Write zeros; return when they are there."""

    def download(self, address: int, target: Any) -> None:
        """Copy to a NumPy array after everything queued on the current stream; return when the data is there."""

    def upload(self, source: Any, address: int) -> None:
        """Copy from a NumPy array after everything queued on the current stream; return when the data is there."""

    def prepare(self, variant: KernelVariant) -> None:
        """Compile and load a kernel."""

    def launch(self, variant: KernelVariant, args: Any, blocks: int, stream: Any) -> None:
        """Queue a prepared kernel with the arguments that rc_cuda_args wrote."""

    def launch_virtual(self, variant: KernelVariant, args: Memory, ranks: int, blocks: int, stream: Any) -> None:
        """Queue one launch of a prepared kernel for several ranks on this device, whose arguments are contiguous.

        Raises ArgumentError if not all blocks can run concurrently.
        """

    def array(self, memory: Memory, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array over memory that keeps it alive."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """The address of an array on a device."""

    device: Device
    address: int
