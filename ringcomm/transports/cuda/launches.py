"""Launched calls: a handle for each call that somebody waits for, and what is known of the others."""

from collections.abc import Callable
from typing import Any, Protocol

from ringcomm.callbacks import call_back
from ringcomm.devices.device import Device
from ringcomm.errors import RingcommError
from ringcomm.native import check, ffi, lib

__all__ = ["CAPTURED", "PendingLaunch"]

CAPTURED = 1 << 63  # in the number of a call that runs when its graph is replayed (kernels/cuda/call.cuh)


class LaunchOwner(Protocol):
    """What a launch needs of the group that made it: watch.py."""

    gpus: Any  # the rc_gpus
    lock: Any  # held while a failure is handled

    @property
    def aborted(self) -> bool: ...
    def wait(self, number: int, timeout: float) -> None: ...
    def poll(self) -> None: ...
    def check_launch(self, number: int) -> None: ...
    def when_ended(self, number: int, callback: Callable[[], object]) -> None: ...


class PendingLaunch:
    """A launched call (ringcomm.transports.calls.StreamPending)."""

    def __init__(self, watch: LaunchOwner, device: Device, number: int, on_own_stream: bool, awaited: bool) -> None:
        self.number = number
        self.awaited = awaited  # the caller waits on this handle, which raises the error of the call
        self.error: RingcommError | None = None
        self.on_stream = not device.blocking
        # Whether the stream on which the arrays were made has waited: then they may be used again there.
        self.may_release = False
        self._watch, self._device, self._on_own_stream = watch, device, on_own_stream
        self._stream = device.stream().ptr

    def wait(self, timeout: float) -> int:
        """Let the current stream wait; on a device whose calls are blocking, the caller too."""
        gpus = self._watch.gpus
        if self._on_own_stream:
            check(lib.rc_gpus_order(gpus, self.number, ffi.cast("void *", self._device.stream().ptr)))
        if self._device.blocking:
            self._watch.wait(self.number, timeout)
        if not self.number & CAPTURED:
            self._watch.poll()
            if self.error:
                raise self.error
            self._watch.check_launch(self.number)
            with self._watch.lock:
                if not self.done():  # the caller may drop this handle: a later call raises the error, too
                    self.awaited = False
        self.may_release = self._device.stream().ptr == self._stream
        return -1

    def finish(self, timeout: float) -> None:
        """Block until the call has ended."""
        self._watch.wait(self.number, timeout)

    @property
    def failed(self) -> bool:
        return self.error is not None or self._watch.aborted

    def done(self) -> bool:
        return bool(lib.rc_gpus_ended(self._watch.gpus, self.number))

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        if self.done():
            call_back(callback)
        else:
            self._watch.when_ended(self.number, callback)
