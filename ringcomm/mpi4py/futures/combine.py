"""Futures made of futures."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Lock
from typing import Any

__all__ = ["collect", "compose"]


def collect(fs: Iterable[Future[Any]]) -> Future[list[Any]]:
    """Return a future of the list of all results; it fails or is canceled with the first that does."""
    futures = list(fs)
    collected: Future[list[Any]] = type(futures[0])() if futures else Future()
    left, lock = len(futures), Lock()

    def take(future: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            done = left == 0
        if future.cancelled():
            collected.cancel()
        elif error := future.exception():
            _settle(collected, lambda: _raise_or_return(error))
        elif done:
            _settle(collected, lambda: [each.result() for each in futures])

    def cancel_the_rest(_: object) -> None:
        for future in futures:
            future.cancel()

    if not futures:
        collected.set_result([])
    collected.add_done_callback(_notify_if_canceled)
    for future in futures:
        future.add_done_callback(take)
    collected.add_done_callback(cancel_the_rest)
    return collected


def compose(
    future: Future[Any],
    resulthook: Callable[[Any], Any] | None = None,
    excepthook: Callable[[BaseException], Any] | None = None,
) -> Future[Any]:
    """Return a future of what `resulthook` makes of the result of another one, and `excepthook` of its exception.

    An exception that `excepthook` returns is raised; so is every exception in a hook.
    """
    composed: Future[Any] = type(future)()

    def take(_: object) -> None:
        if future.cancelled():
            composed.cancel()
        elif error := future.exception():
            _settle(composed, lambda: _raise_or_return(excepthook(error) if excepthook else error))
        else:
            _settle(composed, lambda: resulthook(future.result()) if resulthook else future.result())

    composed.add_done_callback(_notify_if_canceled)
    future.add_done_callback(take)
    composed.add_done_callback(lambda _: composed.cancelled() and future.cancel())
    return composed


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    """Set what a function returns or raises, unless the future is canceled, or is done."""
    if future.done():
        return
    with suppress(InvalidStateError):  # another thread was faster
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


def _notify_if_canceled(future: Future[Any]) -> None:
    """Wake those who wait for a canceled future in `wait` and `as_completed`: no executor does."""
    if future.cancelled():
        future.set_running_or_notify_cancel()


def _raise_or_return(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value
