"""Collective communication for Python: every call ends with a result or a named error."""

from typing import TYPE_CHECKING, Any

from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.errors import (
    Aborted,
    ArgumentError,
    CollectiveTimeout,
    MemoryShortage,
    MismatchError,
    PeerLost,
    RingcommError,
)
from ringcomm.start import init
from ringcomm.types import premul_sum
from ringcomm.version import VERSION
from ringcomm.work import Work

if TYPE_CHECKING:
    from ringcomm.launcher.launch import launch

__version__ = VERSION

__all__ = [
    "Aborted",
    "ArgumentError",
    "CollectiveTimeout",
    "Communicator",
    "Config",
    "MemoryShortage",
    "MismatchError",
    "PeerLost",
    "RingcommError",
    "Work",
    "init",
    "launch",
    "premul_sum",
]


def __getattr__(name: str) -> Any:
    """Import `launch` at its first use: a rank that a launcher has started needs neither it nor multiprocessing."""
    if name != "launch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ringcomm.launcher.launch import launch

    globals()["launch"] = launch
    return launch


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
