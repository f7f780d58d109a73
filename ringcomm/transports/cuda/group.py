"""A group of GPUs that access each other's memory: an arena on each, and the launches.

A call is one kernel launch on the caller's stream. The kernels of all ranks start, wait and fail by themselves
(kernels/cuda/call.cuh); monitor.py does what they cannot.
"""

import logging
import os
import threading
import time
from typing import Any

from ringcomm.devices.contract import Device, Event, Memory
from ringcomm.errors import Aborted, ArgumentError, MemoryShortage, MismatchError, RingcommError, refuse
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.contract import CollectiveCall, LocalTransport
from ringcomm.transports.cuda.arena import Arena
from ringcomm.transports.cuda.kernels import LaunchPlan, plan_launch
from ringcomm.transports.cuda.monitor import SHORTEST, LaunchMonitor, PendingLaunch
from ringcomm.transports.cuda.symmetric import BufferLease, DeviceBuffers

__all__ = ["CudaGroup", "Unreachable"]

PROBE = 10.0  # seconds in which GPUs that access each other's memory answer
FAREWELL = 2.0  # seconds in which peers close too

log = logging.getLogger("ringcomm")
_kept: list[Memory] = []  # that peers may still use when their group is closed here


class Unreachable(RingcommError):
    """Some GPUs of the group cannot access each other's memory. Raised on all ranks."""


class CudaGroup:
    """One rank's end of a group of GPUs. The constructor is a collective of `host`, which has the same ranks.

    Raises Unreachable on all ranks if a GPU cannot access another's memory.
    """

    def __init__(self, host: LocalTransport, device: Device) -> None:
        self.device = device
        self._host = host
        self._process = os.getpid()
        self._launching = threading.Lock()
        self._last: tuple[Any, Event] | None = None  # the stream of the last launch, and its event
        channel = host.split(0, host.rank)
        assert channel is not None
        self._channel = channel  # for this class only
        self._buffers = DeviceBuffers(device, channel)
        try:
            exported = channel.run_on_all("all_gather", self._allocate)
            for step in (lambda: self._open([handle for _, handle in exported]), self._probe):
                for rank, reason in enumerate(channel.run_on_all("all_gather", step)):
                    if reason:
                        raise Unreachable(f"{exported[rank][0]} of rank {rank} does not reach all others: {reason}")
        except BaseException:
            channel.close()
            raise

    def _allocate(self) -> tuple[str, str]:
        self._arena = Arena(self.device, self._host.rank, self._host.size)
        self._monitor = LaunchMonitor(self._host, self._channel, self.device, self._arena)
        self.wait, self.finish = self._monitor.wait, self._monitor.finish
        self.poll, self.check = self._monitor.poll, self._monitor.check
        return self.device.name, self.device.export(self._arena.memory)

    def _open(self, handles: list[str]) -> str:
        """Open the arenas of the peers; return the reason if that fails."""
        host = self._host
        self._barrier = Blockwise(host.rank, host.size, "barrier", CollectiveCall(0, 0, 0, 0))
        self._barrier_plan = plan_launch(self._barrier, self.device.shape)
        try:
            self._arena.open(handles)
            self.device.prepare(self._barrier_plan.variant)
        except (OSError, RuntimeError) as error:  # RuntimeError: CuPy's
            return str(error) or repr(error)
        return ""

    def _probe(self) -> str:
        """Let every GPU write to every other; return the reason if one does not arrive."""
        limit = min(PROBE, self._host.timeout)
        event = self._enqueue(self.device, self.device.new_stream(), self._barrier, self._barrier_plan, 0, limit)
        while not event.done:
            time.sleep(SHORTEST)
        control = self._arena.control
        return f"it has not heard of rank {control.peer} for {limit:g} s" if control.failed else ""

    def call(self, device: Device, call: Blockwise, timeout: float, awaited: bool) -> PendingLaunch:
        """Queue a call on the current stream. Its error is raised by the handle if `awaited`, else by a later call."""
        self.check_device(device)
        self._refuse_in_handler(call.description)
        own = call.rows[self._host.rank], call.recv_rows[self._host.rank]
        if own[0] != own[1]:
            raise refuse("recv_counts, of this rank's own block", f"{own[0]}, as in send_counts", own[1])
        plan = plan_launch(call, self.device.shape)
        captured, stream = device.capturing(), device.stream()
        if captured and plan.recv_offsets:
            raise refuse("counts", "equal blocks while a CUDA graph is captured", call.description)
        device.prepare(plan.variant)
        with self._launching, self._monitor.inside:
            number = self._monitor.register(call, timeout, captured)
            traced = not captured and self._monitor.traced()
            if self._last and self._last[0] != stream and not captured:
                device.wait(stream, self._last[1])  # the kernels of a group run one after the other
            try:
                begin = device.record(stream, timed=True) if traced else None
                event = self._enqueue(device, stream, call, plan, number, timeout, traced)
            except RuntimeError as error:  # CUDA's
                failure = RingcommError(f"{call.description} could not be launched on {device.name}: {error}")
                self._monitor.fail(failure)
                raise failure from error
            launch = PendingLaunch(self._monitor, device, number, event, captured, awaited)
            launch.traced = (begin, call) if begin else None
            self._monitor.add(launch)
            if not captured:
                self._last = stream, event
        return launch

    def _enqueue(
        self,
        device: Device,
        stream: Any,
        call: Blockwise,
        plan: LaunchPlan,
        number: int,
        timeout: float,
        timed: bool = False,
    ) -> Event:
        args = self._arena.arguments(call, plan, number, timeout, self._buffers.locations(call))
        device.launch(plan.variant, args, plan.blocks, stream)
        return device.record(stream, timed)

    def check_device(self, device: Device) -> None:
        if device.name != self.device.name:
            raise refuse("array", f"one on {self.device.name}, as the first of this communicator", device.name)

    def _refuse_in_handler(self, description: str) -> None:
        if self._monitor.inside.depth:
            text = f"{description} was called by a signal handler, in the middle of another call"
            raise ArgumentError(text, rank=self._host.rank)

    def allocate(self, description: str, size: int) -> BufferLease:
        """Make a symmetric buffer. Collective. Raises MemoryShortage on all ranks if one has not enough."""
        self._refuse_in_handler(description)
        self.finish()
        self.check()
        with self._monitor.inside, self._monitor.exchanging:
            try:
                return self._buffers.allocate(description, size)
            except (MemoryShortage, MismatchError):  # raised on all ranks
                raise
            except RingcommError as error:
                self._monitor.fail(error)
                raise
            except BaseException as error:  # a signal
                self._monitor.interrupted(error)
                raise

    def close(self) -> bool:
        """End the launches in flight, and free the arena when no peer has it open. Return False in a signal handler
        that has interrupted a call: that call ends first.
        """
        if self._process != os.getpid():
            return True
        if self._monitor.inside.depth:
            reason = f"rank {self._host.rank} was closed by a signal handler"
            self._monitor.fail(Aborted(reason, rank=self._host.rank))
            return False
        buffers = self._buffers.own()
        try:
            self.finish()
            self._arena.opened.clear()
            self._buffers.close()
            self._channel.all_gather_facts("all_gather", "closed", FAREWELL)
        except (RingcommError, RuntimeError):
            if not self.device.memory_outlives_owner:
                _kept.extend([self._arena.memory, *(buffer.memory for buffer in buffers)])
                text = "rank %d keeps %d bytes of %s until it ends: not all ranks have closed the communicator"
                size = self._arena.size + sum(buffer.size for buffer in buffers)
                log.warning(text, self._host.rank, size, self.device.name)
        self._channel.close()
        self._monitor.close()
        return True
