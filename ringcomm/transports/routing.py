"""Routes arrays: those in host memory to the transport, those on GPUs to kernels or through host memory.

If all GPUs of a group can access each other's memory, a collective is one kernel launch on the caller's stream
(cuda/group.py); the first one connects the GPUs. On several hosts the GPUs of each host do their part
(network/gpus.py). All other collectives on GPUs are staged in host memory (staged/).

A message goes through a slot of the sender's GPU, or in chunks through host memory (cuda/messages.py).
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ringcomm.arrays.adapters import GPU_ARRAYS
from ringcomm.devices.contract import Pointer
from ringcomm.errors import ArgumentError, RingcommError, refuse
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.calls import CollectiveCall, Fused, Pending, TransferCall
from ringcomm.transports.contract import LocalTransport, Transport
from ringcomm.transports.staged.calls import StagedCalls
from ringcomm.types import COLLECTIVES

if TYPE_CHECKING:  # the first call on a GPU imports what it takes
    from ringcomm.devices.device import Device
    from ringcomm.transports.cuda.group import CudaGroup, RmsNorm
    from ringcomm.transports.cuda.messages import GpuMessages

__all__ = ["ArrayRouter"]

log = logging.getLogger("ringcomm")


class ArrayRouter:
    """The calls of a communicator that depend on where an array is; all others it makes to its transport directly.

    Attributes:
        name: That of the transport, and how the GPUs are connected, once they are.
        fused: As those of the transport, for arrays in host memory and on GPUs.
    """

    def __init__(self, cpu: Transport) -> None:
        """`cpu`: the transport, for host memory."""
        self._cpu = cpu
        self.name = cpu.name
        self.fused: Mapping[str, Fused] = {name: self._fused(name) for name in COLLECTIVES}
        self._group: CudaGroup | None = None
        self._gpu_messages: GpuMessages | None = None
        self._coalesces_messages = False
        self._unraised: RingcommError | None = None  # for the end of close()
        self._local: LocalTransport | None = cpu.as_local  # None once its GPUs prove unable to access each other
        self._connecting = threading.Lock()
        self._staged = StagedCalls(cpu)
        self._has_launches = False  # whether a barrier must wait for launches

    # --- Collectives --------------------------------------------------------------------------------------------------

    def start(self, collective: str, call: CollectiveCall, timeout: float) -> Pending:
        device = _device(call)
        if device is None:
            self._finish_before_barrier(collective)
            return self._staged.follow(collective, call, timeout)
        started = self._call_gpu(device, collective, call, timeout, async_op=True)
        assert started
        return started

    def _fused(self, name: str) -> Fused:
        on_cpu = self._cpu.fused[name]

        def collective(call: CollectiveCall, timeout: float) -> None:
            device = _device(call)
            if device is None:
                if self._has_launches:
                    self._finish_before_barrier(name)
                self._staged.drain()
                on_cpu(call, timeout)
                return
            launched = self._call_gpu(device, name, call, timeout, async_op=False)
            if launched and device.blocking:
                launched.wait(-1.0)

        return collective

    def _call_gpu(
        self, device: "Device", name: str, call: CollectiveCall, timeout: float, *, async_op: bool
    ) -> Pending | None:
        """Launch a collective, or do it staged in host memory; None: it is done."""
        source, target = (pointer.address if isinstance(pointer, Pointer) else 0 for pointer in call[:2])
        on_gpu = call._replace(source=ffi.cast("void *", source), target=ffi.cast("void *", target))
        if not self._group:
            check(lib.rc_check_collective(self._cpu.rank, self._cpu.size, COLLECTIVES[name].code, [on_gpu], 1))
        group = self._connect_gpus(device)
        if group is None:
            call = call._replace(source=source, target=target)
            return self._staged.call(device, name, call, timeout, async_op)
        return group.call(device, name, on_gpu, timeout, awaited=async_op or device.blocking, async_op=async_op)

    def all_reduce_rms_norm(self, device: "Device", call: CollectiveCall, norm: "RmsNorm") -> bool:
        """Do an all_reduce on GPUs and its RMSNorm in one launch. False: it cannot be one; nothing was done."""
        group = self._connect_gpus(device)
        if group is None or not group.can_normalize(call, norm.width):
            return False
        launched = group.call(device, "all_reduce", call, -1.0, awaited=device.blocking, async_op=False, norm=norm)
        if device.blocking:
            launched.wait(-1.0)
        return True

    def _connect_gpus(self, device: "Device") -> "CudaGroup | None":
        """Return the GPUs of the group; None if some cannot access each other."""
        with self._connecting:
            if self._group is None and device.capturing():
                text = "the first collective on GPUs, and calls staged in host memory, cannot be captured"
                raise ArgumentError(f"{text} into a CUDA graph", rank=self._cpu.rank)
            if self._group is None and self._local:
                from ringcomm.transports.cuda.group import CudaGroup, Unreachable

                try:
                    self._group = CudaGroup(self._local, device)
                    self._use_gpus(True)
                    self.name = f"{self._cpu.name}+{'cuda_vmm' if device.by_descriptor else 'cuda_ipc'}"
                    if not device.blocking:
                        address = int(ffi.cast("uintptr_t", self._group.handle))
                        self._cpu.fast_path.connect_gpus(
                            address, self._group.handle, GPU_ARRAYS[device.family], device.ordinal
                        )
                except Unreachable as error:
                    log.warning("arrays on GPUs go through host memory: %s", error)
                    self._local = None
        return self._group

    def _use_gpus(self, whether: bool) -> None:
        self._has_launches = whether
        self._cpu.fast_path.defer_barriers(whether)

    def _finish_before_barrier(self, collective: str) -> None:
        """Before a barrier, also that of ranks that leave, wait for all calls on GPUs."""
        if COLLECTIVES[collective].moves_as == "barrier":
            self._finish()

    def _finish(self) -> None:
        for launched in (self._group, self._gpu_messages):
            if launched:
                launched.finish()

    # --- Point to point -----------------------------------------------------------------------------------------------

    def _messages(self, device: "Device") -> "GpuMessages":
        """Return the GPU of this rank, for messages."""
        with self._connecting:
            if self._gpu_messages is None and device.capturing():
                text = "messages of arrays on GPUs cannot be captured into a CUDA graph"
                raise ArgumentError(text, rank=self._cpu.rank)
            if self._gpu_messages is None:
                from ringcomm.transports.cuda.messages import GpuMessages

                self._gpu_messages = GpuMessages(self._cpu, device)
                self._use_gpus(True)
                self._gpu_messages.coalesce(self._coalesces_messages)
        return self._gpu_messages

    def start_transfer(self, transfer: TransferCall, async_op: bool = True) -> Pending:
        if not isinstance(transfer.data, Pointer):
            return self._cpu.start_transfer(transfer)
        return self._messages(transfer.data.device).start(transfer, async_op)

    def transfer(self, transfer: TransferCall) -> int:
        if isinstance(transfer.data, Pointer):
            return self.start_transfer(transfer, async_op=False).wait(-1.0)
        return self._cpu.transfer(transfer)

    def exchange(self, sent: TransferCall, received: TransferCall) -> int:
        if not (isinstance(sent.data, Pointer) or isinstance(received.data, Pointer)):
            return self._cpu.exchange(sent, received)
        receive = self.start_transfer(received, async_op=False)
        try:
            self.start_transfer(sent, async_op=False).wait(-1.0)
        except RingcommError:
            with suppress(RingcommError):  # the first error is raised, but no memory may be in use then
                receive.wait(-1.0)
            raise
        return receive.wait(-1.0)

    def coalesce_messages(self, begins: bool) -> None:
        """Launch messages of arrays on GPUs together that are started until a call with False, or a wait."""
        self._coalesces_messages = begins
        if self._gpu_messages:
            self._gpu_messages.coalesce(begins)

    # --- Groups, memory, ends -----------------------------------------------------------------------------------------

    def allocate(self, description: str, size: int) -> Any:
        self._staged.drain()
        return self._cpu.allocate(description, size)

    def allocate_on(self, device: "Device", description: str, size: int) -> Any:
        """Return `size` zero bytes of a device, shared if all GPUs can access each other. Raises MemoryShortage on
        every rank if one has too little.
        """
        if device.capturing():
            raise ArgumentError("a symmetric buffer cannot be made while a CUDA graph is captured", rank=self._cpu.rank)
        if self._group:
            self._group.check_device(device)
        self._staged.drain()
        self._cpu.allocate(description, 0)  # compares the ranks' requests
        if group := self._connect_gpus(device):
            return group.allocate(description, size)
        memory: list[Any] = []
        self._cpu.run_on_all("empty", lambda: memory.append(device.allocate(max(size, 1), description)))
        return memory[0]

    def share_segments(self, device: "Device", addresses: Iterable[int]) -> None:
        """Make segments of the program's allocator, in which these addresses are, symmetric: see cuda/segments.py.

        Collective if it is the first call on GPUs, which connects them; later calls wait for no rank.
        """
        if group := self._connect_gpus(device):
            group.check_device(device)
            group.share_segments(addresses)

    def split(self, color: int | None, key: int) -> Transport | None:
        self._staged.drain()
        return self._cpu.split(color, key)  # a new communicator routes again

    def all_gather_facts(self, name: str, fact: Any, timeout: float = -1.0) -> list[Any]:
        self._staged.drain()
        return self._cpu.all_gather_facts(name, fact, timeout)

    def run_on_all(self, name: str, action: Callable[[], Any], timeout: float = -1.0) -> list[Any]:
        self._staged.drain()
        return self._cpu.run_on_all(name, action, timeout)

    def close(self) -> bool:
        try:
            self._cpu.check_before_close()
        except RingcommError as error:
            self._unraised = self._unraised or error
        if self._group:
            if not self._group.close():
                return False
            self._cpu.fast_path.disconnect_gpus()
            self._unraised = self._unraised or self._group.unraised
        self._group = None
        self._use_gpus(False)
        self._staged.stop()
        if self._gpu_messages:
            lost = self._gpu_messages.close()
            self._unraised = self._unraised or lost
        closed = True  # also where it raises, because messages are lost
        try:
            closed = self._cpu.close()
        finally:
            if closed:
                if self._gpu_messages:
                    self._gpu_messages.free()
                self._gpu_messages = None
                closed = self._staged.close()
        failure = self._unraised
        if closed and failure:
            self._unraised = None
            raise failure
        if closed:
            self._staged.check_dropped()
        return closed

    def synchronize(self) -> None:
        self._staged.drain()
        self._finish()

    def check(self) -> None:
        if self._group:
            self._group.poll()
            self._group.check()
        self._cpu.check()

    def check_dropped(self) -> None:
        self._cpu.check_dropped()
        self._staged.check_dropped()


def _device(call: CollectiveCall) -> "Device | None":
    """Return the device where the memory of a call is; None for host memory."""
    if not (isinstance(call.source, Pointer) or isinstance(call.target, Pointer)):
        return None
    given = [pointer for pointer in call[:2] if pointer != NULL]
    names = [pointer.device.name if isinstance(pointer, Pointer) else "host memory" for pointer in given]
    if len({*names}) > 1:
        raise refuse("out", f"memory where x is, {names[0]}", names[-1])
    device: Device = given[0].device
    return device
