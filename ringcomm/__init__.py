"""Collective communication for Python: every call ends with a result or a named error."""

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
from ringcomm.launcher.launch import launch
from ringcomm.start import init
from ringcomm.types import premul_sum
from ringcomm.version import VERSION
from ringcomm.work import Work

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
