"""The collectives of a communicator whose arrays on GPUs are staged in host memory, and the calls that follow them."""

from typing import TYPE_CHECKING

from ringcomm.errors import Aborted
from ringcomm.transports.calls import CollectiveCall, Pending
from ringcomm.transports.contract import Transport
from ringcomm.transports.staged.queue import CallQueue

if TYPE_CHECKING:  # the first array on a GPU imports what it takes
    from ringcomm.devices.device import Device
    from ringcomm.transports.staged.staging import Staging

__all__ = ["StagedCalls"]


class StagedCalls:
    """Those of one rank. `cpu` is the transport for host memory; no collective overtakes one that is queued here."""

    def __init__(self, cpu: Transport) -> None:
        self._cpu = cpu
        self._staging: dict[str, Staging] = {}  # by device
        self._queue = CallQueue(cpu.rank, cpu.fast_path.defer_collectives, cpu.fail)

    def call(self, device: "Device", name: str, call: CollectiveCall, timeout: float, async_op: bool) -> Pending | None:
        """Do a collective of arrays on a GPU; with `async_op`, queue it."""
        from ringcomm.transports.cuda.tracing import traced_as_one
        from ringcomm.transports.staged.staging import Staging

        self._check()
        staging = self._staging.get(device.name)
        if not staging:
            staging = self._staging[device.name] = Staging(device, self._cpu.rank, self._check, self._cpu.fail)
        with staging.shared_failures():
            queued = device.record_event(device.stream())

        def run() -> None:
            with staging.call_after(queued), traced_as_one(self._cpu, name, call):
                if not self._cpu.collective_on_gpus(staging, name, call, timeout):
                    staging.collective(self._cpu, name, call, timeout)

        if async_op:
            return self._queue.add(name, run)
        self._queue.drain()
        run()
        return None

    def follow(self, name: str, call: CollectiveCall, timeout: float) -> Pending:
        """Start a collective of arrays in host memory."""
        if self._queue:
            return self._queue.add(name, lambda: self._cpu.fused[name](call, timeout))
        return self._cpu.start(name, call, timeout)

    def check_dropped(self) -> None:
        """Raise the error of a call whose work was dropped, once."""
        if error := self._queue.take_unraised():
            raise error

    def drain(self) -> None:
        """Wait for all calls that are queued."""
        if self._queue:
            self._queue.drain()

    def stop(self) -> None:
        """Let calls end that wait for a GPU; those that wait for peers end when the CPU transport is closed."""
        self._queue.closing = True

    def close(self) -> bool:
        """Free the pinned memory, after the CPU transport is closed; False in the middle of a call, as its `close`."""
        if any(staging.called_here() for staging in self._staging.values()):
            return False
        self._queue.close()
        for staging in self._staging.values():
            staging.free()
        return True

    def _check(self) -> None:
        """Raise what has to end a call."""
        self._cpu.check()
        if self._queue.closing:
            raise Aborted(f"rank {self._cpu.rank} has closed the communicator", rank=self._cpu.rank)
