"""The values that describe a device, its memory and its kernels."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

__all__ = ["CudaStream", "KernelVariant", "Memory", "MessageShape", "Pointer", "Shape"]


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


@dataclass(frozen=True, slots=True)
class Pointer:
    """The address of an array on a device."""

    device: Any  # a device.Device, of which ranks without a GPU import nothing
    address: int
