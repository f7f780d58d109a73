"""Which way an array goes: a transport around another one, which moves host memory, for arrays on GPUs as well.

Where all GPUs of a group reach each other a collective on them is one kernel launch on the caller's stream
(cuda/group.py); the GPUs meet at the first. On several hosts an all_reduce keeps the sums of each host on its GPUs
(mpi/hierarchy.py). All else goes through host memory: point-to-point, and collectives of GPUs that do not reach each
other.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ringcomm.completion import call_back
from ringcomm.devices.contract import Device, Pointer
from ringcomm.errors import ArgumentError, in_words, raise_told, refuse
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.contract import NOT_QUICK, Fused, OverHosts, Pending, Transport
from ringcomm.transports.cuda.group import CudaGroup, Unreachable
from ringcomm.transports.shm import ShmTransport
from ringcomm.types import COLLECTIVES, DTYPES

__all__ = ["RoutingTransport"]

log = logging.getLogger("ringcomm")

REASON = 200  # bytes of why there is no memory
FLOAT8 = DTYPES["float8_e4m3fn"]  # and what comes after: reduced on GPUs only


class RoutingTransport:
    """One rank's end of a group; `host` moves what lies in host memory."""

    def __init__(self, host: Transport) -> None:
        self.name, self.rank, self.size, self.timeout = host.name, host.rank, host.size, host.timeout
        self.fused: Mapping[str, Fused] = {name: partial(self._collective, name) for name in COLLECTIVES}
        self.quick: Any = getattr(host, "quick", NOT_QUICK)
        self.abort, self.report, self.way = host.abort, host.report, host.way
        self._host = host
        self._group: CudaGroup | None = None
        self._reachable = isinstance(host, ShmTransport)  # as far as is known: CUDA IPC ends where the machine ends
        self._meeting = threading.Lock()
        self.on_gpus = False  # whether there are launches that a barrier must wait for

    # --- Collectives --------------------------------------------------------------------------------------------------

    def start(self, collective: str, source: Any, target: Any, *call: Any) -> Pending:
        device = _device(source, target)
        if device is None:
            self._settle(collective)
            return self._host.start(collective, source, target, *call)
        return self._launch(device, collective, True, source, target, *call)

    def _collective(self, name: str, source: Any, target: Any, *call: Any) -> None:
        device = _device(source, target)
        if device is None:
            self._settle(name)
            self._host.fused[name](source, target, *call)
            return
        launched = self._launch(device, name, device.blocking, source, target, *call)
        if device.blocking or not self.on_gpus:
            launched.wait(-1.0)

    def _launch(self, device: Device, name: str, asked: bool, source: Any, target: Any, *call: Any) -> Pending:
        *facts, timeout = call
        places = [pointer.address if isinstance(pointer, Pointer) else 0 for pointer in (source, target)]
        self._check(name, places, facts)
        blockwise = Blockwise(self.rank, self.size, name, *places, *facts)
        group = self._meet(device)
        if group is None:
            hosts = self._host
            sums = name == "all_reduce" and blockwise.dtype < FLOAT8
            if sums and isinstance(hosts, OverHosts) and hosts.gpus_meet(device):
                hosts.all_reduce_on_gpus(blockwise, timeout)
                return _Done()
            return self._staged(device, blockwise, facts, timeout)
        limit = self.timeout if timeout < 0 else timeout
        return group.call(device, blockwise, places[0], places[1], limit, asked)

    def _meet(self, device: Device) -> CudaGroup | None:
        """Return the GPUs of the group; None if some do not reach each other."""
        with self._meeting:
            if self._group is None and device.capturing():
                text = "what goes through host memory, or is the first collective on GPUs, cannot be captured"
                raise ArgumentError(f"{text} into a CUDA graph", rank=self.rank)
            if self._group is None and self._reachable and isinstance(self._host, ShmTransport):
                try:
                    self._group = CudaGroup(self._host, device)
                    self.on_gpus, self.name = True, f"{self._host.name}+cuda_ipc"
                except Unreachable as error:
                    log.warning("arrays on GPUs go through host memory: %s", error)
                    self._reachable = False
        return self._group

    def _staged(self, device: Device, call: Blockwise, facts: list[Any], timeout: float) -> Pending:
        """Do a collective by way of host memory."""
        gives, gets = call.counts()
        source = _downloaded(Pointer(device, call.source), gives, call.dtype)
        target = source if call.source == call.target and gives == gets else _empty(gets, call.dtype)
        memory = (ffi.from_buffer(data) if data.size else NULL for data in (source, target))
        pending = self._host.start(call.name, *memory, *facts, timeout)
        return _Staged(pending, source, Pointer(device, call.target), target)

    def _settle(self, collective: str) -> None:
        """See to it that a barrier comes after all calls on GPUs."""
        if self._group and collective == "barrier":
            self._group.finish()

    def _check(self, name: str, places: list[int], facts: list[Any]) -> None:
        """Refuse what makes no sense, as the core does."""
        count, dtype, *more = facts
        pointers = [ffi.cast("void *", place) for place in places]
        if dtype >= FLOAT8:  # what the CPU cannot reduce makes sense where it is so for float16, in half the elements
            count, dtype = count // 2, DTYPES["float16"]
        check(lib.rc_check_collective(self.rank, self.size, COLLECTIVES[name], *pointers, count, dtype, *more))

    # --- Point to point -----------------------------------------------------------------------------------------------

    def isend(self, data: Any, count: int, dtype: int, *call: Any) -> Pending:
        if not isinstance(data, Pointer):
            return self._host.isend(data, count, dtype, *call)
        staged = _downloaded(data, count, dtype)
        return _Staged(self._host.isend(ffi.from_buffer(staged), count, dtype, *call), staged)

    def irecv(self, data: Any, count: int, dtype: int, *call: Any) -> Pending:
        if not isinstance(data, Pointer):
            return self._host.irecv(data, count, dtype, *call)
        staged = _empty(count, dtype)
        return _Staged(self._host.irecv(ffi.from_buffer(staged), count, dtype, *call), None, data, staged)

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

    def allocate(self, words: str, size: int) -> Any:
        return self._host.allocate(words, size)

    def allocate_on(self, device: Device, words: str, size: int) -> Any:
        """Return `size` zero bytes of a device, shared where all GPUs reach each other. Raises MemoryShortage on every
        rank, if one has not enough.
        """
        if device.capturing():
            raise ArgumentError("a symmetric buffer cannot be made while a CUDA graph is captured", rank=self.rank)
        if self._group:
            self._group.check_device(device)
        self._host.allocate(words, 0)  # all ranks ask for the same
        if group := self._meet(device):
            return group.allocate(words, size)
        failure: Exception | None = None
        try:
            memory = device.allocate(max(size, 1), words)
        except Exception as error:  # whatever it is: the others wait
            failure = error
        reasons = bytearray(REASON * self.size)
        mine = in_words(failure).encode()[:REASON].ljust(REASON, b"\0")
        facts = ffi.from_buffer(mine), ffi.from_buffer(reasons), REASON, DTYPES["uint8"], 0, 1.0, 0, NULL, -1.0
        self._host.fused["all_gather"](*facts)
        each = (reasons[at : at + REASON] for at in range(0, len(reasons), REASON))
        raise_told((reason.rstrip(b"\0").decode(errors="replace") for reason in each), self.rank, failure, "empty")
        return memory

    def split(self, color: int | None, key: int) -> Transport | None:
        return self._host.split(color, key)  # whose communicator will find its own ways

    def close(self) -> bool:
        if self._group and not self._group.close():
            return False
        self._group, self.on_gpus = None, False
        return self._host.close()

    def check(self) -> None:
        if self._group:
            self._group.look()
            self._group.check()
        self._host.check()


class _Done:
    """A call that was done at once."""

    def wait(self, timeout: float) -> int:  # noqa: ARG002
        return -1

    def done(self) -> bool:
        return True

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        call_back(callback)


class _Staged:
    """A call on host memory, in place of memory on a device: what has come is copied there when it is done."""

    def __init__(self, pending: Pending, source: Any, target: Pointer | None = None, came: Any = None) -> None:
        self._pending, self._source, self._target = pending, source, target
        self._came: Any = came
        self._uploading = threading.Lock()  # somebody may wait while another thread is called back

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
            if self._came is not None and self._came.size and self._target:
                self._target.device.upload(self._came, self._target.address)
            self._came = None


def _device(*pointers: Any) -> Device | None:
    """Return the device that these are on; None is the host."""
    devices = [pointer.device for pointer in pointers if isinstance(pointer, Pointer)]
    if not devices:
        return None
    given = [pointer for pointer in pointers if pointer != NULL]
    names = [pointer.device.name if isinstance(pointer, Pointer) else "host memory" for pointer in given]
    if len({*names}) > 1:
        raise refuse("out", f"memory where x is, {names[0]}", names[-1])
    return devices[0]


def _empty(count: int, dtype: int) -> Any:
    return np.empty(count * lib.rc_dtype_bytes(dtype), np.uint8)


def _downloaded(source: Pointer, count: int, dtype: int) -> Any:
    staged = _empty(count, dtype)
    if staged.size:
        source.device.download(source.address, staged)
    return staged
