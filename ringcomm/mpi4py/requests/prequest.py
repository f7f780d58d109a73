"""Persistent requests, which start the same operation again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringcomm.mpi4py.base.errors import ERR_REQUEST, failure
from ringcomm.mpi4py.base.unsupported import UnsupportedMethod
from ringcomm.mpi4py.requests.operations import Persistent
from ringcomm.mpi4py.requests.request import Request, check_requests
from ringcomm.transports.requests import start_all

__all__ = ["Prequest"]


class Prequest(Request):
    """An operation that can be started again and again."""

    @classmethod
    def _check_kind(cls, named: Any) -> None:
        if not isinstance(named, Persistent):
            raise TypeError("expected a persistent request")

    def Start(self) -> None:
        """Start the operation."""
        if not start_all((self,)):
            _startable(self, "request").start()

    @classmethod
    def Startall(cls, requests: Sequence[Prequest]) -> None:
        """Start several operations; none if one of them is refused."""
        started = start_all(requests)
        if started < len(requests):
            check_requests(requests)
            for named in _all_startable(requests, started):
                named.start()

    Pready = UnsupportedMethod("send each part by Isend")
    Pready_range = UnsupportedMethod("send each part by Isend")
    Pready_list = UnsupportedMethod("send each part by Isend")
    Parrived = UnsupportedMethod("receive each part by Irecv")


def _startable(request: Request, name: str) -> Persistent:
    """Return the operation that the request starts; refuse a request that cannot start."""
    named = request._object
    if named is None:
        raise failure(ERR_REQUEST, f"{name}: expected a persistent request, got REQUEST_NULL, or one that was freed")
    if not isinstance(named, Persistent):
        raise failure(ERR_REQUEST, f"{name}: expected a persistent request, got one of a single operation")
    if named.active:
        text = f"{name}: expected one that is not active, got one that was started: wait for it before its next start"
        named.context.fail(failure(ERR_REQUEST, text))
    return named


def _all_startable(requests: Sequence[Request], first: int) -> list[Persistent]:
    """Return the operations from the first one on; refuse all if one of them cannot start."""
    found: dict[Persistent, int] = {}
    for index in range(first, len(requests)):
        named = _startable(requests[index], f"requests[{index}]")
        if (before := found.setdefault(named, index)) != index:
            text = f"requests[{index}]: expected another request, got requests[{before}] again"
            named.context.fail(failure(ERR_REQUEST, text))
    return list(found)
