"""Buffers on a GPU, through CuPy."""

from typing import Any

import cupy

from .collectives import Array
from .library import HostBuffers

__all__ = ["CudaBuffers"]


class CudaBuffers(HostBuffers):
    """CuPy arrays, one GPU per rank; ranks beyond the number of GPUs start over."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.gpus: int = cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(rank % self.gpus).use()
        number = cupy.cuda.runtime.runtimeGetVersion()
        version = f"{number // 1000}.{number % 1000 // 10}"
        self.versions = {"CuPy": cupy.__version__, "CUDA": version, **self.versions}

    def memory(self, size: int, huge: bool) -> Any:  # noqa: ARG002 (the driver decides)
        return cupy.ones(size, cupy.uint8)

    def read(self, array: Any) -> Array:
        values: Array = cupy.asnumpy(array)
        return values

    def write(self, array: Any, values: Array) -> None:
        array.set(values)

    def finish(self) -> None:
        cupy.cuda.get_current_stream().synchronize()
