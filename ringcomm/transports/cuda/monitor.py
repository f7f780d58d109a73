"""The launches of a group of GPUs that are in flight: waiting for them, and failing when a kernel or a peer fails.

While launches are in flight a thread checks that all peers are alive, aborts the kernels when the group has failed, and
fails the group when a kernel has reported a failure.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue

from ringcomm.completion import call_back, call_back_apart
from ringcomm.devices.contract import Device, Event
from ringcomm.errors import Aborted, CollectiveTimeout, PeerLost, RingcommError
from ringcomm.machine.threads import start_thread
from ringcomm.native import check, ffi, lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.contract import LocalTransport
from ringcomm.transports.cuda.arena import MAX_LAUNCHES, Arena
from ringcomm.transports.cuda.failures import UNKNOWN, LaunchedCall, compare_calls, counts_differ, timed_out
from ringcomm.transports.cuda.kernels import REASONS
from ringcomm.transports.waits import INFINITE, Deadline
from ringcomm.types import COLLECTIVES

__all__ = ["SHORTEST", "LaunchMonitor", "PendingLaunch"]

SHORTEST, LONGEST = 50e-6, 2e-3  # seconds between two polls, growing
# Seconds in which a launch may still complete after a peer exits: the peer may have done its part.
COMPLETION_TIMEOUT = 1.0

log = logging.getLogger("ringcomm")


class CallDepth(threading.local):
    """Whether this thread launches or waits, so that a signal handler knows what it has interrupted."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class LaunchMonitor:
    """The launches of one rank. `channel` is a group of its own, of the same ranks as `host`."""

    def __init__(self, host: LocalTransport, channel: LocalTransport, device: Device, arena: Arena) -> None:
        self.lock = threading.RLock()  # guards all fields; no thread that holds it waits for a kernel
        self.exchanging = threading.Lock()  # one thread at a time uses the channel
        self.inside = CallDepth()
        self._host, self._channel, self._device, self._arena = host, channel, device, arena
        self._control = arena.control
        self._process = os.getpid()
        self._traced = ffi.new("int *")
        self._number = 0  # of the newest call
        self._queued = 0  # of the newest call whose launch has returned
        self._calls: dict[int, LaunchedCall] = {}
        self._in_flight: deque[PendingLaunch] = deque()
        self._unraised: RingcommError | None = None
        self._added = threading.Condition(self.lock)
        self._watcher: threading.Thread | None = None
        self._closed = False
        self._callbacks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._completion_deadline: Deadline | None = None  # for launches that wait for a lost peer

    # --- Launches -----------------------------------------------------------------------------------------------------

    def register(self, call: Blockwise, timeout: float, captured: bool) -> int:
        """Return the number of a new call. Raises the failure of the group, or of an earlier call."""
        while len(self._in_flight) >= MAX_LAUNCHES and not captured:
            time.sleep(SHORTEST)
            self.poll()
        with self.lock:
            if not captured:
                self._read_record()
            self.check()
            self._number += 1
            counts = (call.rows, call.recv_rows) if call.recv_rows is not call.rows else None
            self._calls[self._number] = LaunchedCall(call.description, timeout, counts)
            self._calls.pop(self._number - 4 * MAX_LAUNCHES, None)
            return self._number

    def traced(self) -> bool:
        """Return whether the calls of this rank are being recorded."""
        check(lib.rc_traced(self._host.handle, self._traced))
        return bool(self._traced[0])

    def _trace(self, launch: "PendingLaunch") -> None:
        """Add a launch that has ended to the trace."""
        if not launch.traced:
            return
        begin, call = launch.traced
        failed = launch.error is not None or bool(self._control.abort)
        facts = COLLECTIVES[call.name].code, call.dtype, call.root, call.joined
        with suppress(RuntimeError):  # CUDA's
            lib.rc_trace_launch(self._host.handle, *facts, begin.time, launch.event.time, failed)

    def add(self, launch: "PendingLaunch") -> None:
        with self.lock:
            self._queued = launch.number
            if not launch.captured:
                self._in_flight.append(launch)
                if self._watcher is None:
                    self._watcher = start_thread("ringcomm GPU", self._watch)
                self._added.notify()

    # --- Waiting ------------------------------------------------------------------------------------------------------

    def wait(self, launch: "PendingLaunch", timeout: float) -> None:
        """Block until a launch has ended. A timeout or a signal fails the group, which ends the launch."""
        deadline, pause = Deadline(timeout if timeout >= 0 else INFINITE), SHORTEST
        with self.inside:
            try:
                while not launch.done():
                    if deadline.passed():
                        call = self._calls.get(launch.number, UNKNOWN)
                        text = f"rank {self._host.rank} waited {timeout:.3g} s for {call.description}"
                        self.fail(CollectiveTimeout(f"{text} on {self._device.name}", rank=self._host.rank))
                        deadline = Deadline(INFINITE)
                    time.sleep(pause)
                    pause = min(LONGEST, 1.5 * pause)
            except BaseException as error:  # a signal
                self.interrupted(error)
                while not launch.done():
                    time.sleep(SHORTEST)
                raise

    def finish(self) -> None:
        """Block until all launches have ended."""
        if self._process == os.getpid():
            for launch in [*self._in_flight]:
                self.wait(launch, -1.0)
            self.poll()

    def check_launch(self, launch: "PendingLaunch") -> None:
        """Raise the failure of the group if a launch has not succeeded: a kernel reports a failure before it ends."""
        if not launch.done() or (self._control.failed and launch.number >= self._control.number):
            self._host.check()

    def check(self) -> None:
        """Raise the failure of the group, or one that no call has raised yet."""
        self._host.check()
        with self.lock:
            error, self._unraised = self._unraised, None
        if error:
            raise error

    # --- Watching -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        pause = SHORTEST
        self._device.exempt_from_capture()
        while True:
            with self.lock:
                while not self._in_flight:
                    if self._closed:
                        return
                    self._added.wait()
                before = len(self._in_flight)
            time.sleep(pause)
            try:
                self.poll()
            except Exception as error:
                log.exception("launches on a GPU can no longer be watched")
                self.fail(RingcommError(f"rank {self._host.rank} cannot watch {self._device.name}: {error!r}"))
            pause = SHORTEST if len(self._in_flight) < before else min(LONGEST, 1.5 * pause)

    def poll(self) -> None:
        """Check the launches in flight, and the peers."""
        if self._process != os.getpid():
            return
        with self.lock:
            self._read_record()
            ended = []
            while self._in_flight and self._in_flight[0].done():
                ended.append(self._in_flight.popleft())
            if ended:
                self._read_record(ended)  # the record may belong to a launch that just ended
                for launch in ended:
                    self._trace(launch)
            callbacks = [callback for launch in ended for callback in launch.take_callbacks()]
            oldest = self._in_flight[0] if self._in_flight else None
        if callbacks:
            self._call_back(callbacks)
        if oldest and not self._control.abort:
            self._check_peers(oldest.number)

    def _call_back(self, callbacks: list[Callable[[], object]]) -> None:
        """Run callbacks in order, on a thread that may block."""
        for callback in callbacks:
            self._callbacks.put(callback)

        def run() -> None:
            for _ in callbacks:
                call_back(self._callbacks.get())

        call_back_apart(run)

    def _read_record(self, ended: "Iterable[PendingLaunch]" = ()) -> None:
        record = self._control
        if record.failed and not record.abort and record.number <= self._queued:  # a kernel can fail within its launch
            self._kernel_failed([*ended, *self._in_flight])

    def _check_peers(self, number: int) -> None:
        """Abort the kernels when the group has failed, or a peer that they still wait for is lost."""
        call = self._calls.get(number, UNKNOWN)
        try:
            self._host.check()
            gone = self._host.gone()
            if not gone:
                self._completion_deadline = None
            elif self._completion_deadline is None:
                self._completion_deadline = Deadline(COMPLETION_TIMEOUT)
            elif self._completion_deadline.passed():
                needed = f"while rank {self._host.rank} needed it in {call.description} on {self._device.name}"
                self.fail(PeerLost(f"rank {gone[0]} died, or closed the communicator, {needed}", rank=gone[0]))
        except RingcommError:
            self._control.abort = 1

    # --- Failures -----------------------------------------------------------------------------------------------------

    def fail(self, error: RingcommError) -> None:
        """Abort the kernels and break the group."""
        self._control.abort = 1
        error.rank = self._host.rank if error.rank is None else error.rank
        with suppress(RingcommError):  # it has failed before
            self._host.fail(error)

    def interrupted(self, error: BaseException) -> None:
        self.fail(Aborted(f"rank {self._host.rank} was interrupted: {error!r}", rank=self._host.rank))

    def _kernel_failed(self, launches: "list[PendingLaunch]") -> None:
        record = self._control
        call = self._calls.get(record.number, UNKNOWN)
        reason = REASONS[record.reason]
        if reason == "mismatch":
            with self.exchanging:
                self._mismatch(record.number, call, launches)
        elif reason == "aborted":
            record.abort = 1
        else:
            self.fail(timed_out(self._host.rank, reason, record.peer, call, self._device.name))

    def _mismatch(self, number: int, call: LaunchedCall, launches: "list[PendingLaunch]") -> None:
        """Fail the call, and reset the arenas so that the group can continue.

        The calls that a rank has launched after it were skipped. If there are any, the ranks cannot tell which later
        calls correspond, and the group fails.
        """
        peer, device = self._control.peer, self._device.name
        if error := counts_differ(self._host.rank, peer, call, device):
            self.fail(error)
            return
        error, usable = compare_calls(self._channel, peer, number, call, self._number - number, device)
        try:
            if not usable:
                raise error
            while not all(launch.done() for launch in launches):
                time.sleep(SHORTEST)
            self._channel.all_gather_facts("all_gather", "ended", call.timeout)
            self._arena.reset()
            self._channel.all_gather_facts("all_gather", "reset", call.timeout)
        except (RingcommError, RuntimeError):
            self.fail(error)
            return
        failed = [launch for launch in launches if launch.number == number]
        for launch in failed:
            launch.error = error
        if not any(launch.awaited for launch in failed):
            self._unraised = error

    def close(self) -> None:
        with self.lock:
            self._closed = True
            self._added.notify()


class PendingLaunch:
    """A launched call (ringcomm.transports.contract.Pending)."""

    def __init__(
        self, monitor: LaunchMonitor, device: Device, number: int, event: Event, captured: bool, awaited: bool
    ) -> None:
        self.number = number
        self.captured = captured  # it runs when the graph is replayed, at a time unknown here
        self.awaited = awaited  # the caller waits on this handle, which raises the error of the call
        self.error: RingcommError | None = None
        self.traced: tuple[Event, Blockwise] | None = None  # when it began
        self.event = event  # its end
        self._monitor, self._device = monitor, device
        self._done = self._called_back = captured
        self._callbacks: list[Callable[[], object]] = []

    def wait(self, timeout: float) -> int:
        """Let the current stream wait; on a device whose calls are blocking, the caller too."""
        if not self.captured:
            self._device.wait(self._device.stream(), self.event)
        if self._device.blocking:
            self._monitor.wait(self, timeout)
        if not self._device.capturing():
            self._monitor.poll()
            if self.error:
                raise self.error
            self._monitor.check_launch(self)
        return -1

    def done(self) -> bool:
        if not self._done and not self._device.capturing():  # querying an event would end the capture
            try:
                self._done = self.event.done
            except RuntimeError as error:  # CUDA's: nothing runs there any more
                self._monitor.fail(RingcommError(f"{self._device.name} has failed: {error}"))
                self._done = True
        return self._done

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        with self._monitor.lock:
            if not self._called_back:
                self._callbacks.append(callback)
                return
        call_back(callback)

    def take_callbacks(self) -> list[Callable[[], object]]:
        """Return the callbacks of a launch that has ended."""
        self._called_back = True
        return self._callbacks
