"""Operations that requests name: the core starts the transfers of plain arrays, and waits for several at once."""

from collections.abc import Callable
from typing import Any, NoReturn

from ringcomm.callbacks import when_done
from ringcomm.errors import RingcommError
from ringcomm.native import check, extension, ffi, lib
from ringcomm.transports.fast_path import FastPath, make_fast_path

__all__ = [
    "RECEIVE",
    "SEND",
    "SYNCHRONOUS_SEND",
    "PendingOperation",
    "PersistentOperation",
    "RequestHandle",
    "RequestMaker",
    "fast_path_with",
    "find_done",
    "start_all",
    "test_all",
    "wait_all",
    "when_ended",
]

# The base of requests: has the operation that a request names as `_object`; None: the request is null.
RequestHandle: Any = extension.RequestHandle

# A StartedCall with the `context` of its communicator, a method `cancel` for a receive, and for its subclass
# `_completed`, `_cancelled` and `_watched`, which are False when the core starts it.
PendingOperation: Any = extension.PendingOperation

# The kinds of transfers.
SEND, SYNCHRONOUS_SEND, RECEIVE = lib.RC_SEND, lib.RC_SEND_SYNCHRONOUS, lib.RC_RECV_MESSAGE

# A PendingOperation that is started again and again, and is `active` meanwhile. After `prepare(maker, kind, array,
# peer, tag)` start_all() and `start_prepared()` start this transfer, unless it is not plain; the latter returns whether
# it is.
PersistentOperation: Any = extension.PersistentOperation

# RequestMaker(fast_path, operation, request): makes operations and requests of these types, subclasses of
# PendingOperation and RequestHandle. `isend(context, array, peer, tag)`, issend and irecv return a request, or
# NotImplemented, before anything has happened, unless all arguments are plain. `operation(context)` was not started.
RequestMaker: Any = extension.RequestMaker

# These take a list or tuple of requests. What is not plain, or fails, is left for the caller.
wait_all: Callable[[Any], bool] = extension.wait_all  # whether all have succeeded; then they name nothing
test_all: Callable[[Any], bool | None] = extension.test_all  # whether all are done; None: the caller has to look
find_done: Callable[[Any], tuple[list[int], list[int]] | None] = extension.find_done  # the active, and the done
# How many have started: all, unless one is not plain, or active, then none; or the first ones, before a failure.
start_all: Callable[[Any], int] = extension.start_all


def fast_path_with(fail: Callable[[RingcommError], NoReturn], handle: Any, rank: int, size: int) -> FastPath:
    """Return another fast path of a communicator, for arrays in host memory: `fail` raises its errors."""

    def check_or_fail(status: int) -> None:
        try:
            check(status)
        except RingcommError as error:
            fail(error)

    return make_fast_path(handle, rank, size, check_or_fail)


def when_ended(call: Any, callback: Callable[[], object]) -> None:
    """Call a function on a thread of ringcomm when a StartedCall has ended."""
    when_done(ffi.cast("rc_work *", call.address), callback)
