"""Who is told when a queued call is done: one thread of the process waits for them all, while there are any.

It calls back in the order in which the calls are done. A callback may wait, also for what another would do: one that
takes longer than STALL keeps its thread, and a spare one goes on in its place.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

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
        self._leader: int | None = None  # the thread that waits, or calls back
        self._calling_since: float | None = None  # when the leader began to
        self._spare = 0

    def add(self, handle: Any, callback: Callback) -> None:
        with self._changed:
            token = next(self._tokens)
            self._callbacks[token] = callback
            try:
                self._need_spare(self._leader is None)
            except BaseException:  # no thread can be had
                del self._callbacks[token]
                raise
        check(lib.rc_work_notify(handle, token))

    def _need_spare(self, needed: bool) -> None:
        if needed and not self._spare:
            threading.Thread(target=self._run, name="ringcomm completions", daemon=True).start()
            self._spare += 1  # it waits for the lock that is held here
        self._changed.notify()

    def _run(self) -> None:
        while self._become_leader():
            while self._lead():
                pass

    def _become_leader(self) -> bool:
        """Wait until there is no leader, or it does not come back; say no if nobody is needed any more."""
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
        """Wait for a call that is done, and call back; say whether this thread still leads."""
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
            with suppress(RuntimeError):  # no thread can be had: then nobody goes on while this callback waits
                self._need_spare(True)
        call_back(callback)
        del callback  # and what it holds
        with self._changed:
            if self._leader == me:
                self._calling_since = None
                return True
            self._spare += 1
            return False


_watcher = _Watcher()


def when_done(handle: Any, callback: Callback) -> None:
    """Call `callback` on a thread of ours once the rc_work is done."""
    _watcher.add(handle, callback)


def call_back(callback: Callback) -> None:
    """Call back. Nobody is there to take what it raises, so that is logged."""
    outer, _here.inside = inside_callback(), True
    try:
        callback()
    except Exception:
        log.exception("a callback of a call that is done has failed")
    finally:
        _here.inside = outer


def inside_callback() -> bool:
    """Say whether this thread is calling back."""
    return getattr(_here, "inside", False)


def call_back_apart(callback: Callback) -> None:
    """Call back on a thread that nobody waits for."""
    threading.Thread(target=call_back, args=(callback,), name="ringcomm callback", daemon=True).start()


def _forget() -> None:
    global _watcher
    _watcher = _Watcher()


if hasattr(os, "register_at_fork"):  # not on Windows, where `init` says what is missing
    os.register_at_fork(after_in_child=_forget)
