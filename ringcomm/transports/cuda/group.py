"""A group of GPUs that access each other's memory: an arena on each, and the launches.

The core launches the kernel of a call (bindings/src/cuda/), on the caller's stream or, with async_op, on the group's
own. The kernels of all ranks start, wait and fail by themselves (kernels/cuda/call.cuh). Here the GPUs connect, and
kernels are compiled; watch.py handles failures.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from ringcomm.devices.contract import CudaStream, Shape
from ringcomm.devices.device import Device
from ringcomm.devices.limits import Limits
from ringcomm.errors import Aborted, ArgumentError, MemoryShortage, MismatchError, RingcommError, refuse
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.calls import CollectiveCall
from ringcomm.transports.contract import LocalTransport
from ringcomm.transports.cuda.arena import Arena
from ringcomm.transports.cuda.deferred_free import free_once_closed, keep
from ringcomm.transports.cuda.kernels import variant_of
from ringcomm.transports.cuda.launches import CAPTURED, PendingLaunch
from ringcomm.transports.cuda.symmetric import BufferLease, DeviceBuffers
from ringcomm.transports.cuda.tracing import LaunchTrace
from ringcomm.transports.cuda.watch import Watch
from ringcomm.types import COLLECTIVES, KERNELS

__all__ = ["CudaGroup", "RmsNorm", "Unreachable"]

PROBE = 10.0  # seconds in which GPUs that access each other's memory answer
BARRIER = COLLECTIVES["barrier"].code
ONE_SHOT = KERNELS["one_shot"]
PACK = 16  # bytes
FUSED_STAGES = 4  # of all channels, for an all_reduce with its RmsNorm at most: an estimate


class Unreachable(RingcommError):
    """Some GPUs of the group cannot access each other's memory. Raised on all ranks."""


class RmsNorm(NamedTuple):
    """RMSNorm after an all_reduce, in the same launch (rc_rms_norm): addresses on the device, multiples of 16."""

    residual: Any
    weight: Any
    output: Any
    width: int
    epsilon: float


class OwnStream(NamedTuple):
    """The stream of a group for calls with async_op."""

    ptr: int


class CudaGroup:
    """One rank's end of a group of GPUs. The constructor is a collective of `cpu`, which has the same ranks.

    Raises Unreachable on all ranks if a GPU cannot access another's memory.
    """

    def __init__(self, cpu: LocalTransport, device: Device) -> None:
        self.device = device
        self.unraised: RingcommError | None = None  # after close(): a failure that no call has raised
        self._cpu = cpu
        self._process = os.getpid()
        # CUDA must not be asked about a destroyed stream: that of the last call, and that of the last captured one.
        self._streams: dict[bool, CudaStream] = {}
        channel = cpu.split(0, cpu.rank)
        assert channel is not None
        self._channel = channel  # for this class only
        try:
            found = channel.run_on_all(
                "all_gather", lambda: (device.uuid, device.gpu.multiprocessors, device.limits(cpu.size))
            )
            gpus, multiprocessors, (limits, *_) = zip(*found, strict=True)  # all ranks use the limits of rank 0
            shape = device.shape_for(max(map(gpus.count, gpus)), min(multiprocessors))
            exported = channel.run_on_all("all_gather", lambda: self._allocate(shape, limits))
            for step in (lambda: self._open([handle for _, handle in exported]), self._probe):
                for rank, reason in enumerate(channel.run_on_all("all_gather", step)):
                    if reason:
                        raise Unreachable(f"{exported[rank][0]} of rank {rank} does not reach all others: {reason}")
            self._watch.start()
        except BaseException:
            channel.close()
            raise

    def _allocate(self, shape: Shape, limits: Limits) -> tuple[str, str]:
        self._arena = Arena(self.device, self._cpu.rank, self._cpu.size, shape)
        self.handle = self._arena.open_group(self._cpu.handle, limits)
        self._own_stream = OwnStream(int(ffi.cast("uintptr_t", lib.rc_gpus_stream(self.handle))))
        self._watch = Watch(self._cpu, self._channel, self.device, self._arena, self.handle)
        self._trace = LaunchTrace(self._cpu, self.device, self._watch)
        self._buffers = DeviceBuffers(self.device, self._channel, self.handle)
        self.wait, self.finish = self._watch.wait, self._watch.finish
        self.poll, self.check = self._watch.poll, self._watch.check
        return self.device.name, self.device.export(self._arena.memory)

    def _open(self, handles: list[str]) -> str:
        """Open the arenas of the peers; return the reason if that fails."""
        try:
            self._arena.open(handles)
            self.device.message_kernel()  # before any kernel of a collective for which its load could wait
            self._load(BARRIER, [CollectiveCall(NULL, NULL, 0, 0)])
        except RingcommError:
            raise
        except (OSError, RuntimeError) as error:  # RuntimeError: CUDA's
            return str(error) or repr(error)
        return ""

    def _probe(self) -> str:
        """Let every GPU write to every other; return the reason if one does not arrive."""
        limit = min(PROBE, self._cpu.timeout)
        stream, number = self.device.new_stream(), ffi.new("uint64_t *")
        arguments, mode = [CollectiveCall(NULL, NULL, 0, 0)], lib.RC_GPUS_PLAIN
        check(lib.rc_gpus_call(self.handle, BARRIER, arguments, ffi.cast("void *", stream.ptr), limit, mode, number))
        self._watch.wait_for_kernel(number[0], limit)
        control = self._arena.control
        return f"no answer from rank {control.peer} within {limit:g} s" if control.failed else ""

    # --- Calls --------------------------------------------------------------------------------------------------------

    def call(
        self,
        device: Device,
        name: str,
        call: CollectiveCall,
        timeout: float,
        awaited: bool,
        async_op: bool,
        stream: CudaStream | None = None,
        norm: RmsNorm | None = None,
    ) -> PendingLaunch:
        """Launch a call on a stream (None: the current one); with `async_op` on the group's own, which waits for it.

        Its error is raised by the handle if `awaited`, else by a later call. `norm` follows an all_reduce.
        """
        self.check_device(device)
        if self._watch.exchanging.here():
            text = f"{name} was called by a signal handler, in the middle of another call"
            raise ArgumentError(text, rank=self._cpu.rank)
        code, arguments, stream = COLLECTIVES[name].code, [call], stream or device.stream()
        pointer, number = ffi.cast("void *", stream.ptr), ffi.new("uint64_t *")
        counts = self._counts(name, call)
        mode = lib.RC_GPUS_ASYNC if async_op else lib.RC_GPUS_PLAIN
        if norm:
            launch_it: Any = partial(lib.rc_gpus_rms_norm, self.handle, arguments, [norm])
        else:
            launch_it = partial(lib.rc_gpus_call, self.handle, code, arguments)
        begin = self._trace.begin(stream)  # the own stream waits for it, too
        self._watch.raise_unraised()
        with self._watch.lock:  # or the call could fail before its handle is known
            while status := launch_it(pointer, timeout, mode, number):
                if status != lib.RC_UNPREPARED:
                    check(status)
                self._watch.poll()
                self.check()
                self._load(code, arguments, pointer, ONE_SHOT if norm else -1)
            launch = PendingLaunch(self._watch, device, number[0], async_op, awaited)
            if awaited or counts:
                self._watch.track(launch, counts)
            self._streams[number[0] >= CAPTURED] = stream
        if begin:
            self._trace.end(begin, self._own_stream if async_op else stream, name, call, launch)
        return launch

    def _counts(self, name: str, call: CollectiveCall) -> tuple[list[int], list[int]] | None:
        """Return counts that only pairs of ranks know."""
        if not COLLECTIVES[name].exchanges or call.counts == NULL:
            return None
        size, rank = self._cpu.size, self._cpu.rank
        sent, received = [*call.counts[0:size]], [*call.counts[size : 2 * size]]
        if sent[rank] != received[rank]:
            raise refuse("recv_counts, of this rank's own block", f"{sent[rank]}, as in send_counts", received[rank])
        return sent, received

    def can_normalize(self, call: CollectiveCall, width: int) -> bool:
        """Return whether one launch does an all_reduce of rows of this width and its RmsNorm; the same on all ranks."""
        shape, item = self._arena.shape, lib.rc_dtype_bytes(call.dtype)
        few = self._cpu.size * call.count * item <= FUSED_STAGES * shape.channels * shape.stage_bytes
        return few and call.count > 0 and width * item <= shape.stage_bytes and width * item % PACK == 0

    def _load(self, code: int, arguments: list[CollectiveCall], pointer: Any = NULL, kernel: int = -1) -> None:
        """Compile and load the kernel of a call, unless it is loaded; `kernel`: see rc_gpus_plan.

        A load may wait for the kernels that this process has launched before. Each of them ends as soon as all ranks
        have launched it; so if all ranks make their calls in one order, as they must, some load can always go on.
        """
        plan, loaded, capturing = ffi.new("rc_cuda_plan *"), ffi.new("int *"), ffi.new("int *")
        check(lib.rc_gpus_plan(self.handle, code, arguments, kernel, plan, loaded))
        if loaded[0]:
            return
        if pointer:
            check(lib.rc_gpus_capturing(self.handle, pointer, capturing))
        if capturing[0]:
            text = "a call whose kernel is not loaded cannot be captured into a CUDA graph: make it once before"
            raise ArgumentError(text, rank=self._cpu.rank)
        function = ffi.cast("void *", self.device.kernel(variant_of(plan)))
        check(lib.rc_gpus_load(self.handle, plan, function))

    def check_device(self, device: Device) -> None:
        if device.name != self.device.name:
            raise refuse("array", f"one on {self.device.name}, as the first of this communicator", device.name)

    # --- Memory, end --------------------------------------------------------------------------------------------------

    def allocate(self, description: str, size: int) -> BufferLease:
        """Make a symmetric buffer. Collective. Raises MemoryShortage on all ranks if one has not enough."""
        self.finish()
        self.check()
        with self._watch.exchanging:
            try:
                return self._buffers.allocate(description, size)
            except (MemoryShortage, MismatchError):  # raised on all ranks
                raise
            except RingcommError as error:
                self._watch.fail(error)
                raise
            except BaseException as error:  # a signal
                reason = f"rank {self._cpu.rank} was interrupted: {error!r}"
                self._watch.fail(Aborted(reason, rank=self._cpu.rank))
                raise

    def share_segments(self, addresses: Iterable[int]) -> None:
        """Make the segments in which these addresses are symmetric, as soon as all ranks have shared theirs."""
        self.check()
        with self._watch.exchanging:
            self._buffers.segments.share(addresses)

    def close(self) -> bool:
        """End the launches in flight, and free the arena when no peer has it open. Return False in a signal handler
        that has interrupted a call: that call ends first.
        """
        if self._process != os.getpid():
            return True
        interrupted = ffi.new("int *")
        check(lib.rc_gpus_interrupted(self.handle, interrupted))
        if interrupted[0] or self._watch.exchanging.here():
            reason = f"rank {self._cpu.rank} was closed by a signal handler"
            self._watch.fail(Aborted(reason, rank=self._cpu.rank))
            return False
        buffers, captured, raised = self._buffers.own(), ffi.new("int *"), ffi.new("int *")
        with suppress(RingcommError):  # it has failed
            check(lib.rc_gpus_end_calls(self.handle, captured, raised))  # of other threads
        if captured[0]:  # a graph may still be replayed
            keep([self._arena, self.handle, self._buffers, *buffers])
        mapped = [self._arena.memory, *(buffer.memory for buffer in buffers)]  # by peers
        size = self._arena.size + sum(buffer.size for buffer in buffers)
        owner = f"rank {self._cpu.rank} keeps {size} bytes of {self.device.name}"
        try:
            self.finish()
            if not captured[0]:
                self._arena.opened.clear()
                self._buffers.close()
        except (RingcommError, RuntimeError):
            keep(mapped)  # the group has failed, and that has been said
            self._channel.close()
        else:
            free_once_closed(self._channel, mapped, owner)
        self.unraised = self._watch.unraised(bool(raised[0]))
        self._watch.close()
        return True
