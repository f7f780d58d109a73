"""Blocks in which NumPy allocates in the heap of a rank (bindings/src/memory/heap.h)."""

import logging
from contextvars import ContextVar
from typing import Any

from ringcomm.machine import memory
from ringcomm.native import check, extension, ffi

__all__ = ["SharedArrays"]

log = logging.getLogger("ringcomm")

# The blocks of this context, each with the handler of NumPy's memory before it.
_open: ContextVar[tuple[tuple[object, Any], ...]] = ContextVar("_open", default=())
_warned: set[str] = set()  # in this process


class SharedArrays:
    """The block of a communicator. It restores NumPy's handler, also if blocks do not end in the reverse order."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle  # of the communicator
        self._entered: list[object] = []

    def __enter__(self) -> None:
        address = int(ffi.cast("uintptr_t", self._handle))
        handler = extension.make_handler(address, check, _available, _warn)
        entered = object()
        if isinstance(handler, str):
            _warn_once("arrays stay private: %s", handler)
        else:
            _open.set((*_open.get(), (entered, extension.set_handler(handler))))
        self._entered.append(entered)

    def __exit__(self, *_: object) -> None:
        ended = self._entered.pop()
        blocks = _open.get()
        index = next((index for index, (entered, _) in enumerate(blocks) if entered is ended), None)
        if index is None:  # there is no heap, or the block began in another context
            return
        before = blocks[index][1]
        later = blocks[index + 1 :]
        if later:
            later = ((later[0][0], before), *later[1:])
        else:
            extension.set_handler(before)
        _open.set((*blocks[:index], *later))


def _available(_: int) -> int:
    return memory.available().bytes


def _warn(bytes: int) -> None:  # noqa: A002 (the unit)
    tightest = memory.available()
    _warn_once(
        "a shared array needs %s, but only %s are available: %s; arrays are private while memory is short",
        memory.mib(bytes),
        memory.mib(tightest.bytes),
        tightest.limit,
    )


def _warn_once(text: str, *values: object) -> None:
    if text not in _warned:
        log.warning(text, *values)
    _warned.add(text)
