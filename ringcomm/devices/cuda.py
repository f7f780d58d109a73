"""NVIDIA GPUs: arrays of CuPy, tensors of torch, and their current streams. docs/gpu.md lists what has run on one."""

import sys
from functools import cache
from typing import Any, NamedTuple

import cupy
import numpy as np

from ringcomm.devices.compiler import cubin
from ringcomm.devices.contract import CudaStream, KernelVariant, Memory, MessageShape, Shape
from ringcomm.devices.device import Device, channels
from ringcomm.devices.driver import LIBCUDA, Driver

__all__ = ["CudaDevice", "device_at", "device_of", "empty"]

cupy.cuda.runtime.getDeviceCount()  # raises without a GPU
driver = Driver(LIBCUDA)


class CudaDevice(Device):
    """A GPU, and CuPy's arrays on it."""

    family = "cuda"
    # 32 blocks for the links of a GPU: an estimate. On an H200 smaller slots cost a tenth, larger ones gained little.
    shape = Shape(channels=32, slots=4, slot_bytes=512 << 10, stage_bytes=32 << 10, line_bytes=8 << 10)
    _staged_bytes = 512 << 10  # of the 16 blocks for which the limits were estimated
    # 32 MiB; an access over NVLink needs 16 channels of 32 KiB in flight.
    message_shape = MessageShape(channels=16, piece_bytes=32 << 10, slots=128, slot_bytes=256 << 10)
    threads = 512  # of a block, at most the launch bounds of entry.cu

    def __init__(self, ordinal: int) -> None:
        super().__init__(driver, ordinal, f"cuda:{ordinal}")
        self.by_descriptor, _ = self.gpu.sharing()

    def shape_for(self, sharing: int, multiprocessors: int) -> Shape:
        most = channels(multiprocessors, sharing)
        return self.shape._replace(channels=min(self.shape.channels, most) if sharing == 1 else most)

    def stream(self) -> Any:
        return cupy.cuda.get_current_stream(self.ordinal)

    def _image(self, variant: KernelVariant | None) -> bytes:
        return cubin(variant, self.gpu.architecture)

    def array(self, owner: Memory, shape: tuple[int, ...], dtype: Any) -> Any:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        unowned = cupy.cuda.UnownedMemory(owner.address, size, owner, self.ordinal)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(unowned, 0))


class TorchStream(NamedTuple):
    """A stream of torch, which torch never destroys."""

    ptr: int


class TorchDevice(CudaDevice):
    """The same GPU for tensors: its current stream is torch's."""

    def stream(self) -> CudaStream:
        return TorchStream(sys.modules["torch"]._C._cuda_getCurrentRawStream(self.ordinal))


@cache
def device_of(ordinal: int, tensors: bool = False) -> CudaDevice:
    """Return a GPU, with the current stream of CuPy or, for tensors, of torch."""
    return (TorchDevice if tensors else CudaDevice)(ordinal)


def device_at(address: int) -> CudaDevice:
    """Return the GPU of an address; of address 0, as of an empty array, the current one."""
    return device_of(driver.ordinal_of(address) if address else cupy.cuda.runtime.getDevice())


def empty(like: Any, shape: tuple[int, ...]) -> Any:
    """Return an array with the dtype of another, on the same GPU."""
    address, _ = like.__cuda_array_interface__["data"]
    with cupy.cuda.Device(device_at(address).ordinal):
        return cupy.empty(shape, like.dtype)
