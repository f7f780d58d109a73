"""A CUDA driver library: libcuda.so.1 of NVIDIA's driver, or the emulated driver, which exports the same functions
(bindings/emulated_cuda). Calls release the GIL.
"""

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from ringcomm.native import FOLDER

__all__ = ["EMULATED", "LIBCUDA", "CudaError", "Driver", "IpcHandle"]

LIBCUDA = "libcuda.so.1"
EMULATED = FOLDER / "_emulated_cuda.so"
OLDEST = 12, 0  # of CUDA, that a driver must support

ORDINAL = 9  # of CUpointer_attribute


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


# The types of parameters; "a" is an address in device memory.
_TYPES = {"p": c_void_p, "i": c_int, "u": c_uint, "n": c_size_t, "a": c_uint64, "b": c_ubyte, "h": IpcHandle}
_FUNCTIONS = {
    "cuInit": "u",
    "cuDriverGetVersion": "p",
    "cuGetErrorName": "ip",
    "cuGetErrorString": "ip",
    "cuDeviceGet": "pi",
    "cuDeviceGetCount": "p",
    "cuDeviceGetName": "pii",
    "cuDeviceGetUuid_v2": "pi",
    "cuDeviceGetAttribute": "pii",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxPushCurrent_v2": "p",
    "cuCtxPopCurrent_v2": "p",
    "cuCtxEnablePeerAccess": "pu",
    "cuMemAlloc_v2": "pn",
    "cuMemFree_v2": "a",
    "cuMemHostAlloc": "pnu",
    "cuMemFreeHost": "p",
    "cuMemcpyAsync": "aanp",
    "cuMemsetD8Async": "abnp",
    "cuPointerGetAttribute": "pia",
    "cuIpcGetMemHandle": "pa",
    "cuIpcOpenMemHandle_v2": "phu",
    "cuIpcCloseMemHandle": "a",
    "cuModuleLoadData": "pp",
    "cuModuleGetFunction": "ppp",
    "cuLaunchCooperativeKernel": "puuuuuuupp",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": "ppin",
    "cuStreamCreateWithPriority": "pui",
    "cuStreamDestroy_v2": "p",
    "cuStreamSynchronize": "p",
    "cuStreamIsCapturing": "pp",
    "cuThreadExchangeStreamCaptureMode": "p",
    "cuEventCreate": "pu",
    "cuEventRecord": "pp",
    "cuEventQuery": "p",
    "cuEventSynchronize": "p",
    "cuEventElapsedTime": "ppp",
    "cuEventDestroy_v2": "p",
}


class CudaError(RuntimeError):
    """A call of the driver failed.

    Attributes:
        code: The CUresult.
        name: Its name, as CUDA_ERROR_OUT_OF_MEMORY.
    """

    def __init__(self, code: int, name: str, text: str, function: str) -> None:
        super().__init__(f"{function}: {name}: {text}")
        self.code, self.name = code, name


class Driver:
    """A driver library. Raises OSError if there is none, and CudaError if it finds no GPU."""

    def __init__(self, library: str | Path = LIBCUDA) -> None:
        self.library = str(library)
        self._functions: dict[str, Any] = {}
        loaded = ctypes.CDLL(self.library)
        for name, parameters in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.argtypes = [_TYPES[letter] for letter in parameters]
            self._functions[name] = function
        version = c_int()
        self("cuDriverGetVersion", byref(version))
        found = version.value // 1000, version.value % 1000 // 10
        if found < OLDEST:
            raise RuntimeError(
                f"the NVIDIA driver supports CUDA {found[0]}.{found[1]}, "
                f"and ringcomm needs {OLDEST[0]}.{OLDEST[1]} or later: update the driver"
            )
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        self.check(name, self._functions[name](*arguments))

    def check(self, name: str, code: int) -> None:
        """Raise the error behind what a function has returned, unless it succeeded."""
        if code:
            raise CudaError(code, self._text("cuGetErrorName", code), self._text("cuGetErrorString", code), name)

    def _text(self, name: str, code: int) -> str:
        text = c_char_p()
        self._functions[name](code, byref(text))
        return text.value.decode() if text.value else f"CUDA error {code}"

    def ordinal_of(self, address: int) -> int:
        """Return the GPU whose memory an address is in."""
        ordinal = c_int()
        self("cuPointerGetAttribute", byref(ordinal), ORDINAL, address)
        return ordinal.value
