"""The native core: `lib`, `ffi`, its modules in C++, and the errors of failed calls."""

import os
import threading
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from ringcomm import errors
from ringcomm.errors import RingcommError, describe_ancestor, refuse
from ringcomm.types import COLLECTIVES

__all__ = [
    "FOLDER",
    "LARGE",
    "LIBRARY",
    "NULL",
    "RECORD",
    "STATUS",
    "GpuMessage",
    "NativeFastPath",
    "StartedCall",
    "check",
    "extension",
    "failure_observers",
    "ffi",
    "has_large_array",
    "lib",
    "open_objects",
    "pack_objects",
    "seconds",
]


class _Interrupt(threading.local):
    raised: BaseException | None = None


class _Missing:
    """Stands for a missing native core: importing works, the first use raises the reason."""

    def __init__(self, reason: ImportError, **types: type) -> None:
        self._reason = reason
        self.__dict__ |= types  # those that have subclasses

    def __getattr__(self, name: str) -> "_Missing":
        return self

    def __call__(self, *_: object, **__: object) -> NoReturn:
        message = f"the native core of ringcomm is missing ({self._reason}); install ringcomm on Linux >= 5.4"
        raise RingcommError(message) from self._reason


_interrupt = _Interrupt()
extension: Any  # bindings/python/: what Python calls without cffi
failure_observers: list[Callable[[RingcommError], None]] = []  # called with every error, before it is raised


def _load_extension(path: str) -> Any:
    """Load the other module in the library of that of cffi."""
    spec: Any = util.spec_from_file_location("ringcomm._fast_path", path)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


try:
    from ringcomm._native import __file__ as _library
    from ringcomm._native import ffi, lib
except ImportError as reason:
    bases = ("StartedCall", "GpuMessage", "RequestHandle", "PendingOperation", "PersistentOperation")
    ffi = lib = extension = _Missing(reason, **{name: type(name, (), {}) for name in bases})
    FOLDER, LIBRARY = Path(__file__).parent, ""
else:
    extension = _load_extension(_library)
    LIBRARY = str(_library)
    FOLDER = Path(LIBRARY).parent  # with the sources of the kernels

    def _keep(kind: type[BaseException], error: BaseException, traceback: TracebackType) -> None:  # noqa: ARG001 (as cffi calls it)
        _interrupt.raised = error

    # Native waits on the main thread call this at intervals. On entry to a Python function the interpreter runs the
    # handlers of pending signals; `check` raises their exceptions.
    @ffi.def_extern(error=1, onerror=_keep)  # type: ignore[untyped-decorator]  # cffi has no types
    def ringcomm_interrupt() -> int:
        return 0

    @ffi.def_extern(error=lib.RC_ARGUMENT, onerror=_keep)  # type: ignore[untyped-decorator]  # cffi has no types
    def ringcomm_record(recorder: Any, collective: int, call: Any) -> int:
        ffi.from_handle(recorder)(collective, call)
        return int(lib.RC_OK)

    lib.rc_set_interrupt(lib.ringcomm_interrupt)
    os.register_at_fork(after_in_child=lib.rc_after_fork)

NULL = ffi.NULL
NativeFastPath: Any = extension.FastPath
StartedCall: Any = extension.StartedCall
GpuMessage: Any = extension.GpuMessage
# pack_objects(objects, codec) returns records (bindings/python/object_records.h), the pickled objects, and the error or
# None; open_objects(records, codec or None) the objects, None without a codec, and None; or, if some have no data, the
# pickled objects that have, None for the others, and the sizes.
pack_objects, open_objects, RECORD = extension.pack_objects, extension.open_objects, extension.RECORD  # RECORD: bytes
# Whether an object, or one in its lists, tuples and dicts, is an array of LARGE bytes or more.
has_large_array, LARGE = extension.has_large_array, extension.LARGE


_ERRORS: dict[int, type[RingcommError]] = {
    lib.RC_ARGUMENT: errors.ArgumentError,
    lib.RC_MISMATCH: errors.MismatchError,
    lib.RC_TIMEOUT: errors.CollectiveTimeout,
    lib.RC_PEER_LOST: errors.PeerLost,
    lib.RC_ABORTED: errors.Aborted,
    lib.RC_INTERRUPTED: errors.Aborted,
    lib.RC_MEMORY: errors.MemoryShortage,
    lib.RC_CLOSED: errors.ArgumentError,
    lib.RC_SYSTEM: errors.RingcommError,
}

# The status that stands for an error; of two that mean the same, the first.
STATUS = {kind: status for status, kind in reversed(_ERRORS.items())}


def check(status: int) -> None:
    """Raise the error of a `status` that is not RC_OK. Must follow the call on the same thread."""
    if status:
        raised, _interrupt.raised = _interrupt.raised, None
        if raised:
            raise raised
        error = _failure(status)
        for observe in failure_observers:
            observe(error)
        raise error


def seconds(timeout: float | None) -> float:
    """Return `timeout` for the C ABI: negative for the communicator's own."""
    if timeout is None:
        return -1.0
    try:
        if timeout >= 0:
            return float(timeout)
    except (TypeError, ValueError, OverflowError):  # a string, an array, an int beyond the range of float
        pass
    raise refuse("timeout", "seconds >= 0, or None for the communicator's", repr(timeout))


def _failure(status: int) -> RingcommError:
    facts = lib.rc_last_error()

    def text(field: Any) -> str:
        return str(ffi.string(field), errors="replace").rstrip()

    message = text(facts.message)
    return _ERRORS[status](
        message,
        rank=facts.rank if facts.rank >= 0 else None,
        peer=facts.peer if facts.peer >= 0 else None,
        collective=list(COLLECTIVES)[facts.collective] if facts.collective >= 0 else None,
        epoch=facts.epoch or None,
        group=describe_ancestor(facts.group_size) if facts.group_size else None,
        # A refusal of the core begins with the name of the argument.
        argument=message.split(maxsplit=1)[0].rstrip(":") if status == lib.RC_ARGUMENT else None,
        expected=text(facts.expected) or None,
        got=text(facts.got) or None,
    )
