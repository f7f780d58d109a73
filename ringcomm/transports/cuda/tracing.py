"""Launches in the trace of a rank: when they began and ended, by events."""

from contextlib import suppress

from ringcomm.devices.contract import CudaStream, Device, TimedEvent
from ringcomm.native import check, ffi, lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.contract import CollectiveCall, LocalTransport
from ringcomm.transports.cuda.launches import PendingLaunch
from ringcomm.transports.cuda.watch import Watch
from ringcomm.types import COLLECTIVES

__all__ = ["LaunchTrace"]


class LaunchTrace:
    """The trace of a rank, `host`, as its launches enter it."""

    def __init__(self, host: LocalTransport, device: Device, watch: Watch) -> None:
        self._host, self._device, self._watch = host, device, watch
        self._traced = ffi.new("int *")

    def begin(self, stream: CudaStream) -> TimedEvent | None:
        """Return the beginning of the launch that comes next on a stream, if the calls of this rank are recorded.

        A captured one is not: it runs when the graph is replayed.
        """
        check(lib.rc_traced(self._host.handle, self._traced))
        return self._device.record(stream) if self._traced[0] and not self._device.capturing() else None

    def end(
        self, begin: TimedEvent, stream: CudaStream, name: str, call: CollectiveCall, launch: PendingLaunch
    ) -> None:
        """Enter a launch once it has ended."""
        end = self._device.record(stream)
        elements = Blockwise(self._host.rank, self._host.size, name, call).joined
        facts = COLLECTIVES[name].code, call.dtype, call.root, elements

        def enter() -> None:
            with suppress(RuntimeError):  # CUDA's
                lib.rc_trace_launch(self._host.handle, *facts, begin.time, end.time, launch.failed)

        self._watch.when_ended(launch.number, enter, may_block=False)
