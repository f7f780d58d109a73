"""Callbacks of queued calls. One thread of the process waits for all calls that have callbacks.

It runs the callbacks in the order in which the calls complete. A callback may wait, even for another callback: if it
takes longer than STALL it keeps its thread, and a spare thread takes over.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ringcomm.errors import RingcommError
from ringcomm.machine.threads import start_thread
from ringcomm.native import check, lib

__all__ = ["call_back", "call_back_apart", "inside_callback", "when_done"]

log = logging.getLogger("ringcomm")

STALL = 0.1  # seconds
IDLE = 1.0  # seconds without anything to wait for, after which a thread ends

Callback = Callable[[], object]
_here = threading.local()


class _Watcher:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tokens = itertools.count(1)
        self._callbacks: dict[int, Callback] = {}
        self._leader: int | None = None  # the thread that waits or runs a callback
        self._calling_since: float | None = None  # since when the leader runs a callback
        self._spare = 0

    def add(self, handle: Any, callback: Callback) -> None:
        with self._changed:
            token = next(self._tokens)
            self._callbacks[token] = callback
            try:
                self._need_spare(self._leader is None)
            except BaseException:  # no thread could be started
                del self._callbacks[token]
                raise
        check(lib.rc_work_notify(handle, token))

    def _need_spare(self, needed: bool) -> None:
        if needed and not self._spare:
            start_thread("ringcomm completions", self._run)
            self._spare += 1  # it waits for the lock held here
        self._changed.notify()

    def _run(self) -> None:
        while self._become_leader():
            while self._lead():
                pass

    def _become_leader(self) -> bool:
        """Wait until no leader is left, or it stalls in a callback. Return False if no thread is needed any more."""
        with self._changed:
            while self._leader is not None or not self._callbacks:
                since = self._calling_since
                if since is not None and time.monotonic() - since > STALL:
                    break
                woken = self._changed.wait(IDLE if since is None else STALL)
                if not woken and not self._callbacks and self._calling_since is None:
                    self._spare -= 1
                    return False
            self._spare -= 1
            self._leader, self._calling_since = threading.get_ident(), None
            return True

    def _lead(self) -> bool:
        """Wait for a completed call and run its callback; return whether this thread still leads."""
        me = threading.get_ident()
        token = lib.rc_next_done(IDLE)
        with self._changed:
            callback = self._callbacks.pop(token, None)
            if callback is None:
                if self._callbacks:
                    return True
                self._leader = None
                self._spare += 1
                return False
            self._calling_since = time.monotonic()
            with suppress(RingcommError):  # no thread: then other callbacks wait for this one
                self._need_spare(True)
        call_back(callback)
        del callback  # and its references
        with self._changed:
            if self._leader == me:
                self._calling_since = None
                return True
            self._spare += 1
            return False


_watcher = _Watcher()


def when_done(handle: Any, callback: Callback) -> None:
    """Call `callback` on a thread of ringcomm once the rc_work is done."""
    _watcher.add(handle, callback)


def call_back(callback: Callback) -> None:
    """Run a callback and log its exception, which has no caller to go to."""
    outer, _here.inside = inside_callback(), True
    try:
        callback()
    except Exception:
        log.exception("a callback of a completed call failed")
    finally:
        _here.inside = outer


def inside_callback() -> bool:
    """Return whether this thread is running a callback."""
    return getattr(_here, "inside", False)


def call_back_apart(callback: Callback) -> None:
    """Run a callback on a thread of its own."""
    start_thread("ringcomm callback", call_back, callback)


def _forget() -> None:
    global _watcher
    _watcher = _Watcher()


if hasattr(os, "register_at_fork"):  # not on Windows, where `init` raises the reason
    os.register_at_fork(after_in_child=_forget)
