"""Routes arrays: those in host memory to the transport, those on GPUs to kernels or through host memory.

If all GPUs of a group can access each other's memory, a collective is one kernel launch on the caller's stream
(cuda/group.py); the first one connects the GPUs. On several hosts an all_reduce sums on the GPUs of each host
(network/gpus.py). Point-to-point and all other collectives on GPUs are staged in host memory.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ringcomm.completion import call_back
from ringcomm.devices.contract import Device, Pointer
from ringcomm.errors import ArgumentError, describe_error, raise_first_failure, refuse
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.contract import CollectiveCall, Fused, LocalTransport, Pending, Transport
from ringcomm.transports.cuda.group import CudaGroup, Unreachable
from ringcomm.types import COLLECTIVES, CPU_DTYPES, DTYPES

__all__ = ["RoutingTransport"]

log = logging.getLogger("ringcomm")

REASON = 200  # bytes of the reason for a shortage of memory


class RoutingTransport:
    """One rank's end of a group; `host` is the transport for host memory."""

    def __init__(self, host: Transport) -> None:
        self.name, self.rank, self.size, self.timeout = host.name, host.rank, host.size, host.timeout
        self.handle, self.fast_path = host.handle, host.fast_path
        self.fail, self.report, self.path = host.fail, host.report, host.path
        self._host = host
        self.fused: Mapping[str, Fused] = {name: self._fused(name) for name in COLLECTIVES}
        self._group: CudaGroup | None = None
        self._local = host.as_local  # None once its GPUs prove unable to access each other
        self._connecting = threading.Lock()
        self.on_gpus = False  # whether a barrier must wait for launches

    @property
    def as_local(self) -> LocalTransport | None:
        return self._host.as_local

    # --- Collectives --------------------------------------------------------------------------------------------------

    def start(self, collective: str, call: CollectiveCall, timeout: float) -> Pending:
        device = _device(call)
        if device is None:
            self._settle(collective)
            return self._host.start(collective, call, timeout)
        return self._launch(device, collective, True, call, timeout)

    def _fused(self, name: str) -> Fused:
        on_host = self._host.fused[name]

        def collective(call: CollectiveCall, timeout: float) -> None:
            device = _device(call)
            if device is None:
                if self._group:
                    self._settle(name)
                on_host(call, timeout)
                return
            launched = self._launch(device, name, device.blocking, call, timeout)
            if device.blocking or not self.on_gpus:
                launched.wait(-1.0)

        return collective

    def _launch(self, device: Device, name: str, awaited: bool, call: CollectiveCall, timeout: float) -> Pending:
        source, target = (pointer.address if isinstance(pointer, Pointer) else 0 for pointer in call[:2])
        call = call._replace(source=source, target=target)
        self._check(name, call)
        group = self._connect_gpus(device)
        if group is None:
            sums = name == "all_reduce" and call.dtype in CPU_DTYPES
            if sums and self._host.all_reduce_on_gpus(device, call, timeout):
                return _Done()
            return self._staged(device, name, call, timeout)
        limit = self.timeout if timeout < 0 else timeout
        return group.call(device, Blockwise(self.rank, self.size, name, call), limit, awaited)

    def _connect_gpus(self, device: Device) -> CudaGroup | None:
        """Return the GPUs of the group; None if some cannot access each other."""
        with self._connecting:
            if self._group is None and device.capturing():
                text = "the first collective on GPUs, and calls staged in host memory, cannot be captured"
                raise ArgumentError(f"{text} into a CUDA graph", rank=self.rank)
            if self._group is None and self._local:
                try:
                    self._group = CudaGroup(self._local, device)
                    self.on_gpus, self.name = True, f"{self._host.name}+cuda_ipc"
                except Unreachable as error:
                    log.warning("arrays on GPUs go through host memory: %s", error)
                    self._local = None
        return self._group

    def _staged(self, device: Device, name: str, call: CollectiveCall, timeout: float) -> Pending:
        """Do a collective of arrays on GPUs in host memory."""
        source_count, target_count = Blockwise(self.rank, self.size, name, call).counts()
        source = _downloaded(Pointer(device, call.source), source_count, call.dtype)
        in_place = call.source == call.target and source_count == target_count
        target = source if in_place else _empty(target_count, call.dtype)
        given, got = (ffi.from_buffer(data) if data.size else NULL for data in (source, target))
        pending = self._host.start(name, call._replace(source=given, target=got), timeout)
        return _Staged(pending, source, Pointer(device, call.target), target)

    def _settle(self, collective: str) -> None:
        """Before a barrier, wait for all calls on GPUs."""
        if self._group and collective == "barrier":
            self._group.finish()

    def _check(self, name: str, call: CollectiveCall) -> None:
        """Check the arguments, as the native core does."""
        source, target = (ffi.cast("void *", address) for address in call[:2])
        arguments = [call._replace(source=source, target=target)]
        check(lib.rc_check_collective(self.rank, self.size, COLLECTIVES[name].code, arguments, 1))

    # --- Point to point -----------------------------------------------------------------------------------------------

    def isend(self, data: Any, count: int, dtype: int, *call: Any) -> Pending:
        if not isinstance(data, Pointer):
            return self._host.isend(data, count, dtype, *call)
        staged = _downloaded(data, count, dtype)
        return _Staged(self._host.isend(ffi.from_buffer(staged), count, dtype, *call), staged)

    def irecv(self, data: Any, count: int, dtype: int, *call: Any, at_most: bool = False) -> Pending:
        if not isinstance(data, Pointer):
            return self._host.irecv(data, count, dtype, *call, at_most=at_most)
        staged = _downloaded(data, count, dtype) if at_most else _empty(count, dtype)  # what does not arrive stays
        pending = self._host.irecv(ffi.from_buffer(staged), count, dtype, *call, at_most=at_most)
        return _Staged(pending, None, data, staged)

    def send(self, data: Any, count: int, dtype: int, *call: Any) -> None:
        if isinstance(data, Pointer):
            data = ffi.from_buffer(_downloaded(data, count, dtype))
        self._host.send(data, count, dtype, *call)

    def recv(self, data: Any, *call: Any) -> int:
        if isinstance(data, Pointer):
            return self.irecv(data, *call).wait(-1.0)
        return self._host.recv(data, *call)

    def sendrecv(self, data: Any, count: int, dtype: int, dest: int, target: Any, *call: Any) -> int:
        if isinstance(data, Pointer):
            data = ffi.from_buffer(_downloaded(data, count, dtype))
        if not isinstance(target, Pointer):
            return self._host.sendrecv(data, count, dtype, dest, target, *call)
        staged = _empty(call[0], call[1])
        source = self._host.sendrecv(data, count, dtype, dest, ffi.from_buffer(staged), *call)
        target.device.upload(staged, target.address)
        return source

    # --- Groups, memory, ends -----------------------------------------------------------------------------------------

    def allocate(self, description: str, size: int) -> Any:
        return self._host.allocate(description, size)

    def shared_arrays(self) -> AbstractContextManager[None]:
        return self._host.shared_arrays()

    def allocate_on(self, device: Device, description: str, size: int) -> Any:
        """Return `size` zero bytes of a device, shared if all GPUs can access each other. Raises MemoryShortage on
        every rank if one has too little.
        """
        if device.capturing():
            raise ArgumentError("a symmetric buffer cannot be made while a CUDA graph is captured", rank=self.rank)
        if self._group:
            self._group.check_device(device)
        self._host.allocate(description, 0)  # compares the ranks' requests
        if group := self._connect_gpus(device):
            return group.allocate(description, size)
        failure: Exception | None = None
        try:
            memory = device.allocate(max(size, 1), description)
        except Exception as error:  # any: the other ranks wait
            failure = error
        reasons = bytearray(REASON * self.size)
        mine = describe_error(failure).encode()[:REASON].ljust(REASON, b"\0")
        call = CollectiveCall(ffi.from_buffer(mine), ffi.from_buffer(reasons), REASON, DTYPES["uint8"])
        self._host.fused["all_gather"](call, -1.0)
        each = (reasons[at : at + REASON] for at in range(0, len(reasons), REASON))
        raise_first_failure(
            (reason.rstrip(b"\0").decode(errors="replace") for reason in each), self.rank, failure, "empty"
        )
        return memory

    def split(self, color: int | None, key: int) -> Transport | None:
        return self._host.split(color, key)  # a new communicator routes again

    def recorded(self, call: str) -> AbstractContextManager[None]:
        return self._host.recorded(call)

    def shrink(self, timeout: float) -> Transport:
        return self._host.shrink(timeout)

    def close(self) -> bool:
        if self._group and not self._group.close():
            return False
        self._group, self.on_gpus = None, False
        return self._host.close()

    def check(self) -> None:
        if self._group:
            self._group.poll()
            self._group.check()
        self._host.check()


class _Done:
    """A call that is already done."""

    def wait(self, timeout: float) -> int:  # noqa: ARG002
        return -1

    def done(self) -> bool:
        return True

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        call_back(callback)


class _Staged:
    """A call on host memory in place of a device's. When it is done, the result is copied to the device."""

    def __init__(self, pending: Pending, source: Any, target: Pointer | None = None, result: Any = None) -> None:
        self._pending, self._source, self._target = pending, source, target
        self._result: Any = result
        self._uploading = threading.Lock()  # wait and callbacks may run on two threads

    def wait(self, timeout: float) -> int:
        source = self._pending.wait(timeout)
        self._upload()
        return source

    def done(self) -> bool:
        if not self._pending.done():
            return False
        self._upload()
        return True

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        def uploaded() -> None:
            self._upload()
            callback()

        self._pending.add_done_callback(uploaded)

    def _upload(self) -> None:
        with self._uploading:
            if self._result is not None and self._result.size and self._target:
                self._target.device.upload(self._result, self._target.address)
            self._result = None


def _device(call: CollectiveCall) -> Device | None:
    """Return the device where the memory of a call is; None is the host."""
    if not (isinstance(call.source, Pointer) or isinstance(call.target, Pointer)):
        return None
    given = [pointer for pointer in call[:2] if pointer != NULL]
    names = [pointer.device.name if isinstance(pointer, Pointer) else "host memory" for pointer in given]
    if len({*names}) > 1:
        raise refuse("out", f"memory where x is, {names[0]}", names[-1])
    device: Device = given[0].device
    return device


def _empty(count: int, dtype: int) -> Any:
    return np.empty(count * lib.rc_dtype_bytes(dtype), np.uint8)


def _downloaded(source: Pointer, count: int, dtype: int) -> Any:
    staged = _empty(count, dtype)
    if staged.size:
        source.device.download(source.address, staged)
    return staged
