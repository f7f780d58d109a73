"""The handle of a launch on a GPU."""

import threading
from collections.abc import Callable
from typing import Protocol

from ringcomm.completion import call_back
from ringcomm.devices.contract import Device, Event
from ringcomm.errors import RingcommError

__all__ = ["Group", "Inside", "Launched"]


class Group(Protocol):
    """What a handle needs of its group."""

    changed: threading.RLock

    def until_done(self, launched: "Launched", timeout: float) -> None:
        """Let the calling thread wait."""

    def look(self) -> None:
        """See what has happened on the device and to the peers."""

    def ended_well(self, launched: "Launched") -> bool:
        """Say whether a launch that is done has done its work."""

    def check_open(self) -> None:
        """Raise what has broken the group."""

    def give_up(self, error: RingcommError) -> None:
        """Break the group."""


class Launched:
    """A call that was launched (ringcomm.transports.contract.Pending)."""

    def __init__(self, group: Group, device: Device, number: int, event: Event, captured: bool, asked: bool) -> None:
        self.number = number
        self.asked = asked  # whether somebody will ask this handle what has become of the call
        self.error: RingcommError | None = None
        self._group, self._device, self._event = group, device, event
        self._captured = captured  # it runs when the graph is replayed, and nobody here knows when
        self._done = captured
        self._callbacks: list[Callable[[], object]] = []
        self._told = captured

    def wait(self, timeout: float) -> int:
        """Let the current stream wait; on a device whose calls are blocking, the caller too."""
        if not self._captured:
            self._device.wait(self._device.stream(), self._event)
        if self._device.blocking:
            self._group.until_done(self, timeout)
        if not self._device.capturing():
            self._group.look()
            if self.error:
                raise self.error
            if not (self.done() and self._group.ended_well(self)):
                self._group.check_open()
        return -1

    def done(self) -> bool:
        if not self._done and not self._device.capturing():  # a look at an event would end the capture
            try:
                self._done = self._event.done
            except RuntimeError as error:  # CUDA's: nothing runs there any more
                self._group.give_up(RingcommError(f"{self._device.name} has failed: {error}"))
                self._done = True
        return self._done

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        with self._group.changed:
            if not self._told:
                self._callbacks.append(callback)
                return
        call_back(callback)

    def tell(self) -> list[Callable[[], object]]:
        """It is done: return whom to call back."""
        self._told = True
        return self._callbacks


class Inside(threading.local):
    """Whether this thread launches, or waits: then a signal handler asks."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
