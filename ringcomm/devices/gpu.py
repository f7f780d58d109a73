"""A GPU through a driver library, for everything that is not hot: memory, kernels, copies, streams and events.

Every call makes the GPU's primary context current, which CuPy and torch use too, and then restores the current context
of the program. Streams, events and addresses are ints; stream 0 is CUDA's default stream.
"""

import ctypes
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_float, c_int, c_uint64, c_void_p
from typing import Any, NamedTuple

from ringcomm.devices import descriptors
from ringcomm.devices.driver import CudaError, Driver, IpcHandle
from ringcomm.errors import MemoryShortage, RingcommError, refuse

__all__ = ["DeviceMemory", "Gpu", "Kernels", "process"]

# Of cuda.h.
NO_MEMORY, NOT_READY, ALREADY_ENABLED, IMPLICIT = 2, 600, 704, 906  # CUresult
RELAXED = 2  # CUstreamCaptureMode
MULTIPROCESSORS, CAPABILITY_MAJOR, CAPABILITY_MINOR, DESCRIPTORS = 16, 75, 76, 103  # CUdevice_attribute
NON_BLOCKING, BLOCKING_SYNC, DISABLE_TIMING, PORTABLE_AND_MAPPED, LAZY_PEER_ACCESS = 1, 1, 2, 3, 1
LEAST_PRIORITY = 0  # of streams

PAGE = 2 << 20  # cuMemAlloc returns parts of blocks of this size, and an IPC handle opens a whole block
TOKEN = secrets.token_hex(4)


def process() -> str:
    """Return 64 bits that no other process has, also not a forked one: an IPC handle opens in other processes only."""
    return f"{TOKEN}{os.getpid():08x}"


class Kernels(NamedTuple):
    """The functions of a module (kernels/cuda/entry.cu), as cuLaunchKernel takes them."""

    one: int  # of one rank
    virtual: int  # of several ranks in one launch


class DeviceMemory:
    """Memory that kernels access, with the function that frees it; none for memory of another rank of this process."""

    def __init__(self, address: int, free: Any = None) -> None:
        self.address, self._free = address, free

    def __del__(self) -> None:
        if self._free and not sys.is_finalizing():
            with suppress(CudaError, RingcommError):  # the context is destroyed or broken
                self._free(self.address)


class Gpu:
    """One GPU of a driver."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver, self.ordinal = driver, ordinal
        self._device = c_int()
        driver("cuDeviceGet", byref(self._device), ordinal)
        self.context = self._retain(ordinal)
        name = ctypes.create_string_buffer(256)
        driver("cuDeviceGetName", name, len(name), self._device)
        self.name = name.value.decode()
        uuid = (ctypes.c_ubyte * 16)()
        driver("cuDeviceGetUuid_v2", byref(uuid), self._device)
        self.uuid = bytes(uuid).hex()  # the same in all processes
        self.architecture = f"sm_{self._attribute(CAPABILITY_MAJOR)}{self._attribute(CAPABILITY_MINOR)}"
        self.multiprocessors = self._attribute(MULTIPROCESSORS)
        self._opened: Counter[int] = Counter()  # by IPC
        self._virtual: set[int] = set()  # opened by descriptor
        self._names = driver.library, self.context, ordinal
        self.copies = self.create_stream()  # waits for nothing that the program has queued

    def _retain(self, ordinal: int) -> int:
        """Return the primary context of a GPU, which then lives until the process ends."""
        device, context = c_int(), c_uint64()
        self.driver("cuDeviceGet", byref(device), ordinal)
        self.driver("cuDevicePrimaryCtxRetain", byref(context), device)
        return context.value

    def _attribute(self, attribute: int) -> int:
        value = c_int()
        self.driver("cuDeviceGetAttribute", byref(value), attribute, self._device)
        return value.value

    @contextmanager
    def current(self) -> Iterator[Driver]:
        """Make the context of this GPU current, and what a capture of another thread would forbid possible."""
        mode = c_int(RELAXED)
        self.driver("cuCtxPushCurrent_v2", self.context)
        self.driver("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            yield self.driver
        finally:
            self.driver("cuThreadExchangeStreamCaptureMode", byref(mode))
            self.driver("cuCtxPopCurrent_v2", byref(c_void_p()))

    def call(self, name: str, *arguments: Any) -> None:
        with self.current() as driver:
            driver(name, *arguments)

    def _create(self, name: str, *arguments: Any) -> int:
        """Return the handle or the address that a function stores at its first argument."""
        made = c_uint64()
        self.call(name, byref(made), *arguments)
        return made.value

    # ---- Memory.

    def allocate(self, size: int, what: str) -> int:
        """Return the address of zeroed memory. Raises MemoryShortage, which names `what`."""
        with self._or_shortage(size, f"{what} on {self.name}"):
            address = self._create("cuMemAlloc_v2", -(-size // PAGE) * PAGE)
        self.clear(address, size)
        return address

    @contextmanager
    def _or_shortage(self, size: int, what: str) -> Iterator[None]:
        try:
            yield
        except CudaError as error:
            if error.code != NO_MEMORY:
                raise
            raise MemoryShortage(f"{what}: {error}", expected=size) from None

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", address)

    def allocate_virtual(self, size: int, what: str) -> int:
        """Return the address of zeroed memory that is exported by descriptor. Raises MemoryShortage."""
        try:
            address = descriptors.allocate(self._names, size)
        except MemoryShortage as error:
            raise MemoryShortage(f"{what} on {self.name}: {error}", expected=size) from None
        self.clear(address, size)
        return address

    def sharing(self) -> tuple[bool, str]:
        """Return whether memory is exported by file descriptors, else by cudaIpc, and why."""
        count = c_int()
        self.driver("cuDeviceGetCount", byref(count))
        if not self._attribute(DESCRIPTORS):
            return False, "the driver has no file descriptors of memory"
        if count.value > 1:
            return False, f"this process sees {count.value} GPUs"
        return True, "this process sees one GPU, so perhaps not those of its peers"

    def export(self, address: int, by_descriptor: bool = False) -> str:
        """Return a handle with which any rank opens memory of `allocate`, or of `allocate_virtual`."""
        if by_descriptor:
            return f"{process()} {self.ordinal} {address} {descriptors.export(address)}"
        ipc = IpcHandle()
        self.call("cuIpcGetMemHandle", byref(ipc), address)
        return f"{process()} {self.ordinal} {address} {bytes(ipc).hex()}"

    def open(self, handle: str) -> int:
        """Return the address at which memory of another rank is mapped here."""
        owner, ordinal, address, ipc = handle.split()
        if owner != process() and ":" in ipc:  # a descriptor
            opened = descriptors.open_exported(self._names, ipc)
            self._virtual.add(opened)
            return opened
        if owner != process():
            opened = self._create(
                "cuIpcOpenMemHandle_v2", IpcHandle.from_buffer_copy(bytes.fromhex(ipc)), LAZY_PEER_ACCESS
            )
            self._opened[opened] += 1
            return opened
        if int(ordinal) != self.ordinal:
            self._enable_peer_access(int(ordinal))
        return int(address)

    def close(self, address: int) -> None:
        """Unmap what `open` returned."""
        if address in self._virtual:
            self._virtual.remove(address)
            descriptors.close(address)
        if self._opened[address]:
            self._opened[address] -= 1
            self.call("cuIpcCloseMemHandle", address)

    def _enable_peer_access(self, ordinal: int) -> None:
        try:
            self.call("cuCtxEnablePeerAccess", self._retain(ordinal), 0)
        except CudaError as error:
            if error.code != ALREADY_ENABLED:
                raise

    def allocate_pinned(self, size: int) -> int:
        """Return the address of zeroed host memory, which kernels access at the same address. Raises MemoryShortage."""
        with self._or_shortage(size, "pinned host memory"):
            address = self._create("cuMemHostAlloc", size, PORTABLE_AND_MAPPED)
        ctypes.memset(address, 0, size)
        return address

    def free_pinned(self, address: int) -> None:
        self.call("cuMemFreeHost", address)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy after everything queued on a stream, in either direction; return when the data is there."""
        with self.current() as driver:
            driver("cuMemcpyAsync", target, source, size, stream)
            driver("cuStreamSynchronize", stream)

    def clear(self, address: int, size: int) -> None:
        """Write zeros; return when they are there."""
        with self.current() as driver:
            driver("cuMemsetD8Async", address, 0, size, self.copies)
            driver("cuStreamSynchronize", self.copies)

    # ---- Kernels.

    def load(self, image: bytes) -> Kernels:
        """Load a cubin, until the process ends."""
        module = self._create("cuModuleLoadData", image)
        return Kernels(
            self._create("cuModuleGetFunction", module, b"ringcomm_kernel"),
            self._create("cuModuleGetFunction", module, b"ringcomm_virtual"),
        )

    def load_messages(self, image: bytes) -> int:
        """Load the kernel of messages, until the process ends; return its function."""
        return self._create("cuModuleGetFunction", self._create("cuModuleLoadData", image), b"ringcomm_messages")

    def launch_virtual(self, kernels: Kernels, args: bytes, ranks: int, blocks: int, threads: int, stream: int) -> None:
        """Queue one launch of several ranks; `args` is a VirtualRanks of kernels/cuda/kernels.cuh.

        Raises ArgumentError if not all blocks can run concurrently.
        """
        each = c_int()
        self.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(each), kernels.virtual, threads, 0)
        most = each.value * self.multiprocessors
        if ranks * blocks > most:
            raise refuse("virtual ranks", f"at most {most} blocks in all", f"{ranks} x {blocks}")
        values = ctypes.create_string_buffer(args, len(args)), c_int(blocks)
        parameters = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        grid, block = (ranks * blocks, 1, 1), (threads, 1, 1)
        self.call("cuLaunchCooperativeKernel", kernels.virtual, *grid, *block, 0, stream, parameters)

    # ---- Streams and events.

    def create_stream(self) -> int:
        """Return a stream that does not wait for the default stream."""
        return self._create("cuStreamCreateWithPriority", NON_BLOCKING, LEAST_PRIORITY)

    def destroy_stream(self, stream: int) -> None:
        """What is queued still runs."""
        self.call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", stream)

    def capturing(self, stream: int) -> bool:
        """Return whether work on a stream is captured into a graph, to be replayed later."""
        status = c_int()
        try:
            self.call("cuStreamIsCapturing", stream, byref(status))
        except CudaError as error:
            if error.code == IMPLICIT:  # the default stream, while another thread captures
                return True
            raise
        return status.value != 0

    def create_event(self, timed: bool = False) -> int:
        return self._create("cuEventCreate", BLOCKING_SYNC | (0 if timed else DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        self.call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", event, stream)

    def reached(self, event: int) -> bool:
        """Return whether everything before the latest record of an event has ended. Raises what has failed."""
        try:
            self.call("cuEventQuery", event)
        except CudaError as error:
            if error.code == NOT_READY:
                return False
            raise
        return True

    def synchronize_event(self, event: int) -> None:
        self.call("cuEventSynchronize", event)

    def elapsed_ms(self, begin: int, end: int) -> float:
        ms = c_float()
        self.call("cuEventElapsedTime", byref(ms), begin, end)
        return ms.value
