"""Requests, and waiting for several of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from ringcomm.mpi4py.base.constants import UNDEFINED
from ringcomm.mpi4py.base.errors import ERR_IN_STATUS, ERR_REQUEST, Exception, failure
from ringcomm.mpi4py.base.handles import Handle, constant
from ringcomm.mpi4py.requests.operations import EMPTY, General, PendingOperation, Persistent, fill, wait_until
from ringcomm.mpi4py.requests.status import Status
from ringcomm.transports.requests import RequestHandle, find_done, test_all, wait_all

__all__ = ["REQUEST_NULL", "Request"]

SPIN = 50e-6  # seconds for which Waitany polls: as long as ringcomm's ranks spin before they sleep


class Request(RequestHandle, Handle):  # type: ignore[misc]  # RequestHandle is in C++
    """A started operation."""

    _object: PendingOperation | Persistent | General | None
    _named: PendingOperation | Persistent | General
    _null = ERR_REQUEST, "a request", "REQUEST_NULL, or one that is complete"

    def __bool__(self) -> bool:
        return self._object is not None

    def Wait(self, status: Status | None = None) -> Literal[True]:
        """Wait until the operation is complete."""
        if status is not None or not wait_all((self,)):
            self._complete(status)
        return True

    def Test(self, status: Status | None = None) -> bool:
        """Return whether the operation is complete. If so, the request becomes null."""
        done: bool | None = None if status is not None else test_all((self,))
        return self._poll(status)[0] if done is None else done

    def wait(self, status: Status | None = None) -> Any:
        """Wait until the operation is complete; return the object received."""
        return self._complete(status)

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Return whether the operation is complete, and the object received."""
        return self._poll(status)

    def Get_status(self, status: Status | None = None) -> bool:
        """Return whether the operation is complete, and leave the request as it is."""
        if self._object is None:
            fill(status, EMPTY)
            return True
        if not self._object.done():
            return False
        self._object.complete(status)
        return True

    def Cancel(self) -> None:
        """Withdraw a receive that no message has matched yet. Sends are not cancelled."""
        self._named.cancel()

    def Free(self) -> None:
        """Free the request. An active operation runs on."""
        named = self._named
        self._nullify()
        named.free()

    get_status, cancel = Get_status, Cancel

    # The methods on several requests call these, which subclasses do not override.

    def _complete(self, status: Status | None = None) -> Any:
        """Wait for the operation and release it; return the object received."""
        named = self._object
        if named is None:
            fill(status, EMPTY)
            return None
        try:
            return named.complete(status)
        except KeyboardInterrupt:  # the operation goes on: the next wait tells how it ends
            named = None
            raise
        finally:
            if named is not None and named.release():
                self._nullify()

    def _poll(self, status: Status | None = None) -> tuple[bool, Any]:
        """Return whether the operation is complete, and the object received; release it if so."""
        done = self._object is None or self._object.done()
        return done, self._complete(status) if done else None

    @property
    def _active(self) -> bool:
        return self._object is not None and self._object.active

    @property
    def _ready(self) -> bool:
        return self._object is None or self._object.done()

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: Any = None) -> list[Any]:
        """Wait for all requests; return the objects received."""
        check_requests(requests)
        return _wait_for_all(requests, range(len(requests)), statuses)

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: Any = None) -> Literal[True]:
        """Wait for all requests."""
        if statuses is not None or not wait_all(requests):
            Request.waitall(requests, statuses)
        return True

    @classmethod
    def testall(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[bool, list[Any] | None]:
        """Return whether all operations are complete, and then the objects received."""
        check_requests(requests)
        if not all(request._ready for request in requests):
            return False, None
        return True, _wait_for_all(requests, range(len(requests)), statuses)

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Return whether all operations are complete."""
        done: bool | None = None if statuses is not None else test_all(requests)
        return Request.testall(requests, statuses)[0] if done is None else done

    @classmethod
    def Get_status_all(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Return whether all operations are complete, and leave the requests as they are."""
        check_requests(requests)
        if not all(request._ready for request in requests):
            return False
        _look_at_all(requests, range(len(requests)), statuses)
        return True

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        """Wait for one of the requests; return its index, UNDEFINED if none is active, and the object received."""
        index, _, value = _any(requests, status, waits=True)
        return index, value

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Status | None = None) -> int:
        """Wait for one of the requests; return its index, UNDEFINED if none is active."""
        return _any(requests, status, waits=True)[0]

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        """Return the index of a complete operation, whether there is one, and the object received."""
        return _any(requests, status)

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """Return the index of a complete operation, and whether there is one or none is active."""
        return _any(requests, status)[:2]

    @classmethod
    def Get_status_any(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """Return what Testany returns, and leave the requests as they are."""
        return _any(requests, status, keeps=True)[:2]

    @classmethod
    def waitsome(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[list[int] | None, list[Any] | None]:
        """Wait for at least one request; return the indices of all complete ones, and the objects received."""
        return _some(requests, statuses, waits=True)

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """Wait for at least one request; return the indices of all complete ones, None if none is active."""
        return _some(requests, statuses, waits=True)[0]

    @classmethod
    def testsome(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[list[int] | None, list[Any] | None]:
        """Return the indices of all complete operations, and the objects received."""
        return _some(requests, statuses)

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """Return the indices of all complete operations, None if none is active."""
        return _some(requests, statuses)[0]

    @classmethod
    def Get_status_some(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """Return what Testsome returns, and leave the requests as they are."""
        return _some(requests, statuses, keeps=True)[0]

    get_status_any, get_status_all, get_status_some = Get_status_any, Get_status_all, Get_status_some


def check_requests(requests: Sequence[Any]) -> None:
    """Refuse what is no request, before any of the others is waited for or started."""
    for index, request in enumerate(requests):
        if not isinstance(request, Request):
            raise TypeError(f"requests[{index}]: expected a Request, got {type(request).__name__}")


def _find_done(requests: Sequence[Request]) -> tuple[list[int], list[int]]:
    """Return the indices of the active requests, and of the active requests that are complete."""
    found: tuple[list[int], list[int]] | None = find_done(requests)
    if found is None:
        check_requests(requests)
        active = [index for index, request in enumerate(requests) if request._active]
        found = active, [index for index in active if requests[index]._ready]
    return found


def _any(
    requests: Sequence[Request], status: Status | None, waits: bool = False, keeps: bool = False
) -> tuple[int, bool, Any]:
    """Return the index of a complete operation, whether there is one or none is active, and the object received."""
    active, ready = _find_done(requests)
    if waits and active and not ready:
        ready = active if len(active) == 1 else _wait_for_some(requests, active)
    if ready:
        request = requests[ready[0]]
        return ready[0], True, Request.Get_status(request, status) if keeps else request._complete(status)
    if not active:
        fill(status, EMPTY)
    return UNDEFINED, not active, None


def _some(
    requests: Sequence[Request], statuses: Any, waits: bool = False, keeps: bool = False
) -> tuple[list[int] | None, list[Any] | None]:
    """Return the indices of all complete operations, None if none is active, and the objects received."""
    active, ready = _find_done(requests)
    if not active:
        return None, None
    if waits and not ready:
        ready = _wait_for_some(requests, active)
    return ready, (_look_at_all if keeps else _wait_for_all)(requests, ready, statuses)


def _statuses(count: int, given: Any) -> list[Status | None]:
    """Return one status for each of `count` operations. A list that is too short is extended."""
    if given is None:
        return [None] * count
    if isinstance(given, list):
        given += [Status() for _ in range(len(given), count)]
    return [*given[:count], *[None] * (count - len(given))]


def _wait_for_all(requests: Sequence[Request], indices: Sequence[int], given: Any) -> list[Any]:
    """Wait for all, and return the objects received.

    If some have failed, raise ERR_IN_STATUS with their errors: the statuses, if given, have the error codes.
    """
    values, failed = [], []
    for index, status in zip(indices, _statuses(len(indices), given), strict=True):
        try:
            values.append(requests[index]._complete(status))
        except Exception as error:
            failed.append(f"request {index}: {error}")
            if status is not None:
                status.Set_error(error.Get_error_code())
    if failed:
        raise failure(ERR_IN_STATUS, "; ".join(failed))
    return values


def _look_at_all(requests: Sequence[Request], indices: Sequence[int], given: Any) -> None:
    """Set the statuses of complete operations, and leave the requests as they are."""
    for index, status in zip(indices, _statuses(len(indices), given), strict=True):
        Request.Get_status(requests[index], status)


def _wait_for_some(requests: Sequence[Request], active: list[int]) -> list[int]:
    """Wait until some of the active requests are complete; return their indices."""

    def ready() -> list[int]:
        left, done = _find_done(requests)
        return done or [index for index in active if index not in left]  # completed by another thread

    spin_until = time.perf_counter() + SPIN
    while time.perf_counter() < spin_until:
        if found := ready():
            return found
    return wait_until(ready, [each._object for each in requests if each._object is not None])


REQUEST_NULL: Request = constant("REQUEST_NULL", Request())
