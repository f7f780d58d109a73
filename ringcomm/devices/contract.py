"""What the transport needs of a device, and the pointer that names an array on one."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

__all__ = [
    "CudaStream",
    "Device",
    "Event",
    "KernelVariant",
    "Memory",
    "MessageShape",
    "Pointer",
    "Shape",
    "TimedEvent",
]


class Shape(NamedTuple):
    """Sizes in the arena of a rank (kernels/cuda/arena.cuh), the same on all ranks."""

    channels: int  # blocks of a launch, at most: all of them run concurrently
    slots: int
    slot_bytes: int
    stage_bytes: int
    line_bytes: int


class MessageShape(NamedTuple):
    """Sizes in the arena of messages of a rank (kernels/cuda/message_arena.cuh), the same on all ranks."""

    channels: int
    piece_bytes: int
    slots: int
    slot_bytes: int


class KernelVariant(NamedTuple):
    """A kernel of kernels/cuda/kernels.cuh, compiled for one dtype and operation: their numbers."""

    kernel: int
    dtype: int
    op: int


class Memory(Protocol):
    """Memory that lives as long as this object."""

    address: int


class CudaStream(Protocol):
    """A queue of launches."""

    @property
    def ptr(self) -> int:
        """The CUstream."""


class Event(Protocol):
    """A point in a stream: reached when everything queued before it has ended."""

    def reached(self) -> bool:
        """Return whether it is. Raises what has failed before it."""


class TimedEvent(Event, Protocol):
    """One that knows when it was reached."""

    @property
    def time(self) -> int:
        """Wait for it, and return when it was reached, in ns of time.monotonic_ns()."""


class Device(Protocol):
    """One rank's view of the device that holds its arrays."""

    name: str
    family: str  # "cuda" or "emulated"
    ordinal: int
    library: str  # the CUDA driver, or one with its functions
    context: int  # the primary CUcontext
    threads: int  # of a block
    shape: Shape
    message_shape: MessageShape
    blocking: bool  # whether calls return only when they are done, as with NumPy arrays

    def stream(self) -> CudaStream:
        """Return the current stream of the calling thread."""

    def new_stream(self) -> CudaStream:
        """Return a stream that waits for nothing the program has queued."""

    def record(self, stream: CudaStream) -> TimedEvent: ...

    def record_event(self, stream: CudaStream) -> Event: ...

    def capturing(self) -> bool:
        """Return whether launches on the current stream are captured into a graph, to be replayed later."""

    def allocate(self, size: int, what: str) -> Memory:
        """Return zeroed memory that other processes can open. Raises MemoryShortage, which names `what`."""

    def allocate_pinned(self, size: int) -> Memory:
        """Return zeroed host memory that kernels access at the same address. Raises MemoryShortage."""

    def export(self, memory: Memory) -> str:
        """Return a handle with which peers open the memory."""

    def open(self, handle: str) -> Memory: ...

    def write(self, memory: Memory, offset: int, data: bytes) -> None:
        """Write from the host; return when the data is there."""

    def clear(self, memory: Memory, size: int) -> None:
        """Write zeros; return when they are there."""

    def copy(self, target: int, source: int, size: int, stream: CudaStream) -> None:
        """Queue a copy between any two of device memory and pinned host memory."""

    def download(self, address: int, target: Any) -> None:
        """Copy to a NumPy array after everything queued on the current stream; return when the data is there."""

    def upload(self, source: Any, address: int) -> None:
        """Copy from a NumPy array after everything queued on the current stream; return when the data is there."""

    def kernel(self, variant: KernelVariant) -> int:
        """Compile and load a kernel, unless it is loaded, and return its CUfunction."""

    def message_kernel(self) -> int:
        """Compile and load the kernel of messages, unless it is loaded, and return its CUfunction."""

    def launch_virtual(self, variant: KernelVariant, args: Memory, ranks: int, blocks: int, stream: CudaStream) -> None:
        """Queue one launch of a loaded kernel for several ranks on this device, whose arguments are contiguous.

        Raises ArgumentError if not all blocks can run concurrently.
        """

    def array(self, owner: Memory, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array over memory that keeps it alive."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """The address of an array on a device."""

    device: Device
    address: int
