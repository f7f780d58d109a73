"""The thread that watches the launches of a rank, and the failures of kernels.

The thread runs in the core and sleeps there (bindings/src/cuda/waits.cpp): it comes back to Python when a kernel has
failed, or a call has ended for which a callback waits. A lost peer is noticed there, in bindings/src/cuda/liveness.cpp.
"""

import heapq
import itertools
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any
from weakref import WeakValueDictionary

from ringcomm.callbacks import call_back, call_back_apart
from ringcomm.devices.device import Device
from ringcomm.errors import Aborted, RingcommError, describe_error
from ringcomm.machine.threads import OwnedLock, start_thread
from ringcomm.native import check, ffi, lib
from ringcomm.transports.contract import LocalTransport
from ringcomm.transports.cuda.arena import Arena
from ringcomm.transports.cuda.failures import UNKNOWN, LaunchedCall, compare_calls, counts_differ, timed_out
from ringcomm.transports.cuda.launches import CAPTURED, PendingLaunch
from ringcomm.types import REASONS

__all__ = ["Watch"]

MARGIN = 5.0  # seconds in which a kernel ends after its timeout, unless its GPU hangs
DESCRIPTION_BYTES = 256  # more than any call needs
COUNTS_KEPT = 256  # calls whose counts an error can name

log = logging.getLogger("ringcomm")


class Watch:
    """The launches of one rank. `channel` is a group of its own, of the same ranks as `cpu`."""

    def __init__(self, cpu: LocalTransport, channel: LocalTransport, device: Device, arena: Arena, gpus: Any) -> None:
        self.gpus = gpus  # the rc_gpus
        self.exchanging = OwnedLock()  # of the channel, which one thread at a time uses
        self.lock = threading.RLock()  # guards all below
        self._cpu, self._channel, self._device, self._arena = cpu, channel, device, arena
        self._control = arena.control
        self._process = os.getpid()
        self._launches: WeakValueDictionary[int, PendingLaunch] = WeakValueDictionary()
        self._counts: dict[int, tuple[list[int], list[int]]] = {}  # of all_to_all
        self._unraised: RingcommError | None = None
        # A heap: numbers of calls, callbacks, and whether these may block.
        self._ends: list[tuple[int, int, Callable[[], object], bool]] = []
        self._order = itertools.count()
        self._callbacks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if not self._thread:
            self._thread = start_thread("ringcomm GPU", self._run)

    def _run(self) -> None:
        stopped = ffi.new("int *")
        try:
            while (status := lib.rc_gpus_watch(self.gpus, stopped)) != lib.RC_CLOSED and not stopped[0]:
                check(status)
                self.poll()
        except BaseException as error:
            log.exception("launches on a GPU can no longer be watched")
            self.fail(RingcommError(f"{self._device.name} can no longer be watched: {describe_error(error)}"))

    @property
    def aborted(self) -> bool:
        return bool(self._control.abort)

    # --- Launches -----------------------------------------------------------------------------------------------------

    def track(self, launch: PendingLaunch, counts: tuple[list[int], list[int]] | None) -> None:
        """Remember a launch whose handle raises its error, or whose counts an error has to name."""
        with self.lock:
            self._launches[launch.number] = launch
            if counts:
                self._counts[launch.number] = counts
                self._counts.pop(next(iter(self._counts)) if len(self._counts) > COUNTS_KEPT else -1, None)

    def when_ended(self, number: int, callback: Callable[[], object], may_block: bool = True) -> None:
        """Call `callback` once a call has ended, on a thread of its own if it may block, else by the next poll."""
        with self.lock:
            heapq.heappush(self._ends, (number, next(self._order), callback, may_block))
        check(lib.rc_gpus_notify(self.gpus, number))

    def wait(self, number: int, timeout: float) -> None:
        """Block until a call has ended. A timeout or a signal fails the group, which ends the call."""
        check(lib.rc_gpus_wait(self.gpus, number, timeout))

    def wait_for_kernel(self, number: int, timeout: float) -> None:
        """Block until a kernel that nothing holds up has ended, which has a timeout of its own."""
        self.wait(number, timeout + MARGIN)

    def finish(self) -> None:
        """Block until all launches have ended."""
        if self._process == os.getpid():
            self.wait(lib.rc_gpus_launched(self.gpus), -1.0)
            self.poll()

    def check_launch(self, number: int) -> None:
        """Raise the failure of the group if a launch has not succeeded: a kernel reports a failure before it ends."""
        if not lib.rc_gpus_ended(self.gpus, number) or (self._control.failed and number >= self._control.number):
            self._cpu.check()

    def check(self) -> None:
        """Raise the failure of the group, or one that no call has raised yet."""
        self._cpu.check()
        self.raise_unraised()

    def raise_unraised(self) -> None:
        """Raise a failure after which the group has gone on, unless a call has raised it."""
        if self._unraised:
            with self.lock:
                error, self._unraised = self._unraised, None
                lib.rc_gpus_allow_fast(self.gpus, 1)
            if error:
                raise error

    def unraised(self, failure_raised: bool) -> RingcommError | None:
        """Return the failure that no call has raised, if any, once all launches have ended.

        `failure_raised`: a call has raised that of the group.
        """
        try:
            if self._control.failed and not failure_raised:
                self._cpu.check()
            self.raise_unraised()
        except RingcommError as error:
            own_abort = isinstance(error, Aborted) and error.rank == self._cpu.rank
            return None if own_abort else error.with_traceback(None)
        return None

    def poll(self) -> None:
        """Handle the failure of a kernel, and call back for the calls that have ended."""
        with self.lock:
            if self._control.failed and not self.aborted and self._failed_call_is_launched():
                self._kernel_failed()
                lib.rc_gpus_resume(self.gpus)
            ended = []
            while self._ends and lib.rc_gpus_ended(self.gpus, self._ends[0][0]):
                *_, callback, may_block = heapq.heappop(self._ends)
                if may_block:
                    ended.append(callback)
                else:
                    callback()
            if self._ends:
                lib.rc_gpus_notify(self.gpus, self._ends[0][0])
        if ended:
            self._call_back(ended)

    def _call_back(self, callbacks: list[Callable[[], object]]) -> None:
        """Run callbacks in order, on a thread that may block."""
        for callback in callbacks:
            self._callbacks.put(callback)

        def run() -> None:
            for _ in callbacks:
                call_back(self._callbacks.get())

        call_back_apart(run)

    # --- Failures -----------------------------------------------------------------------------------------------------

    def fail(self, error: RingcommError) -> None:
        """Abort the kernels and break the group."""
        self._control.abort = 1
        error.rank = self._cpu.rank if error.rank is None else error.rank
        with suppress(RingcommError):  # it has failed before
            self._cpu.fail(error)

    def _call(self, number: int) -> LaunchedCall:
        text, timeout, copied = ffi.new("char[]", DESCRIPTION_BYTES), ffi.new("double *"), ffi.new("int *")
        if lib.rc_gpus_describe(self.gpus, number, text, len(text), timeout, copied):
            return UNKNOWN
        return LaunchedCall(str(ffi.string(text), "ascii"), timeout[0], bool(copied[0]), self._counts.get(number))

    def _failed_call_is_launched(self) -> bool:
        """Return whether the launch of the call that has failed has returned: a kernel can fail before."""
        number = self._control.number  # complete once `failed` is set
        return bool(number & CAPTURED) or number <= lib.rc_gpus_launched(self.gpus)

    def _kernel_failed(self) -> None:
        record = self._control
        number, call, reason = record.number, self._call(record.number), REASONS[record.reason]
        if reason == "mismatch":
            with self.exchanging:
                self._mismatch(number, call)
        elif reason == "counts":
            self.fail(counts_differ(self._cpu.rank, record.peer, call, self._device.name))
        elif reason == "aborted":
            record.abort = 1
        else:
            self.fail(timed_out(self._cpu.rank, reason, record.peer, call, self._device.name))

    def _mismatch(self, number: int, call: LaunchedCall) -> None:
        """Fail the call, and reset the arenas so that the group can continue.

        The calls that a rank has launched after it were skipped. If there are any, the ranks cannot tell which later
        calls correspond, and the group fails.
        """
        peer, device = self._control.peer, self._device.name
        newest = lib.rc_gpus_launched(self.gpus)
        skipped = 1 if number & CAPTURED else newest - number  # a graph may have been replayed again
        error, usable = compare_calls(self._channel, peer, number & ~CAPTURED, call, skipped, device)
        try:
            if not usable:
                raise error
            self.wait_for_kernel(newest, call.timeout)
            self._channel.all_gather_facts("all_gather", "ended", call.timeout)
            self._arena.reset()
            self._channel.all_gather_facts("all_gather", "reset", call.timeout)
        except (RingcommError, RuntimeError):
            self.fail(error)
            return
        launch = self._launches.get(number)
        if launch:
            launch.error = error
        if not (launch and launch.awaited):
            self._unraised = error
            lib.rc_gpus_allow_fast(self.gpus, 0)

    def close(self) -> None:
        lib.rc_gpus_stop(self.gpus)
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()
