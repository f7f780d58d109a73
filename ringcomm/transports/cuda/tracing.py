"""Collectives on GPUs in the trace of a rank: when they began and ended."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ringcomm.devices.contract import CudaStream
from ringcomm.devices.device import Device, TimedEvent
from ringcomm.native import check, ffi, lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.calls import CollectiveCall
from ringcomm.transports.contract import LocalTransport, Transport
from ringcomm.transports.cuda.launches import PendingLaunch
from ringcomm.transports.cuda.watch import Watch
from ringcomm.types import COLLECTIVES

__all__ = ["LaunchTrace", "traced_as_one"]


class LaunchTrace:
    """The trace of a rank, `cpu`, as its launches enter it, with times of events."""

    def __init__(self, cpu: LocalTransport, device: Device, watch: Watch) -> None:
        self._cpu, self._device, self._watch = cpu, device, watch
        self._traced = ffi.new("int *")

    def begin(self, stream: CudaStream) -> TimedEvent | None:
        """Return the beginning of the launch that comes next on a stream, if the calls of this rank are recorded.

        A captured one is not: it runs when the graph is replayed.
        """
        check(lib.rc_traced(self._cpu.handle, self._traced))
        return self._device.record(stream) if self._traced[0] and not self._device.capturing() else None

    def end(
        self, begin: TimedEvent, stream: CudaStream, name: str, call: CollectiveCall, launch: PendingLaunch
    ) -> None:
        """Enter a launch once it has ended."""
        end = self._device.record(stream)
        facts = _facts(self._cpu, name, call)

        def enter() -> None:
            with suppress(RuntimeError):  # CUDA's
                lib.rc_trace_launch(self._cpu.handle, *facts, begin.time, end.time, launch.failed)

        self._watch.when_ended(launch.number, enter, may_block=False)


@contextmanager
def traced_as_one(cpu: Transport, name: str, call: CollectiveCall) -> Iterator[None]:
    """Let the trace list one collective on a GPU in place of those on host memory that the block makes."""
    facts, begin, failed = _facts(cpu, name, call), time.monotonic_ns(), True
    check(lib.rc_trace_parts(cpu.handle, True))
    try:
        yield
        failed = False
    finally:
        lib.rc_trace_parts(cpu.handle, False)
        lib.rc_trace_launch(cpu.handle, *facts, begin, time.monotonic_ns(), failed)


def _facts(cpu: Transport, name: str, call: CollectiveCall) -> tuple[int, int, int, int]:
    return COLLECTIVES[name].code, call.dtype, call.root, Blockwise(cpu.rank, cpu.size, name, call).joined
