"""The settings: argument › Config › RINGCOMM_* › `ringcomm tune` › default. place.py reads the environment too."""

import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from ringcomm.errors import integer, refuse, unknown
from ringcomm.machine import tuning

__all__ = ["Config", "cache_folder", "tuning_file"]

T = TypeVar("T")
PREFIX = "RINGCOMM_"
# Set by `ringcomm run` for the ranks it starts, read by place.py: rank, size, job and nonce.
LAUNCHER = ("RINGCOMM_RANK", "RINGCOMM_SIZE", "RINGCOMM_JOB", "RINGCOMM_NONCE")

TUNING = "RINGCOMM_TUNING"

# A segment is whole cache lines.
LEAST_BYTES = {
    "arena_bytes": 0,
    "sub_arena_bytes": 0,
    "segment_bytes": 64,
    "one_shot_bytes": 0,
    "nontemporal_bytes": 1,
    "direct_bytes": 1,
    "cma_bytes": 1,
}
TEXTS = ("algorithm", "host_id", "kernels", "log")
MEASURED = ("nontemporal_bytes", "cma_bytes")  # if they are None


def _optional(text: str) -> str | None:
    return text or None


def _flag(text: str) -> bool:
    return {"0": False, "1": True}[text]


EXPECTED = {float: "a number", int: "an integer", _flag: "0 or 1"}


def _setting(name: str, default: T, parse: Callable[[str], T]) -> T:
    """Declare the field `name`, whose default the environment may override."""
    variable = PREFIX + name.upper()

    def value() -> T:
        text = os.environ.get(variable)
        if text is None:
            return _tuned(name, default)
        try:
            return parse(text)
        except (ValueError, KeyError):
            raise refuse(variable, EXPECTED[parse], repr(text)) from None

    return field(default_factory=value)


def tuning_file() -> Path | None:
    """Return the file of `ringcomm tune`: the one that RINGCOMM_TUNING names (None if empty), else one in ~/.config."""
    chosen = os.environ.get(TUNING)
    if chosen is not None:
        return Path(chosen) if chosen else None
    try:
        folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError:  # this user has no home
        return None
    return Path(folder, "ringcomm", "tuning.json")


def cache_folder() -> Path:
    """Return the folder for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ringcomm")


def _tuned(name: str, default: T) -> T:
    path = tuning_file() if name in tuning.TUNABLE else None
    found = tuning.read(path) if path else {}
    return cast(T, integer(f"{name} in {path}", found[name], LEAST_BYTES[name])) if name in found else default


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of a communicator.

    A field that is not given is read from the environment variable `RINGCOMM_<FIELD>`, else from the file of
    `ringcomm tune`, else it has its default. All ranks of a job use the values of rank 0, except `kernels`, `log` and
    `host_id`, which each process sets for itself.
    """

    timeout: float = _setting("timeout", 300.0, float)
    """Seconds a call may take, unless the call has a timeout of its own."""
    arena_bytes: int = _setting("arena_bytes", 8 << 20, int)
    """Shared memory of one rank, in bytes; raised if the channels between very many ranks need more."""
    sub_arena_bytes: int = _setting("sub_arena_bytes", 1 << 20, int)
    """The same for a communicator made by `split`."""
    segment_bytes: int = _setting("segment_bytes", 256 << 10, int)
    """The most bytes of a block in a chunk of a staged collective; all of a chunk together take at most twice this."""
    one_shot_bytes: int = _setting("one_shot_bytes", 16 << 10, int)
    """An all_reduce up to this size takes one synchronization: every rank reduces the whole array."""
    nontemporal_bytes: int | None = _setting("nontemporal_bytes", None, int)
    """Blocks of at least this size are staged with non-temporal stores. None: measured at connect, on rank 0."""
    direct_bytes: int = _setting("direct_bytes", 16 << 10, int)
    """Symmetric buffers of at least this size are accessed directly. If the ranks are threads of one process, so are
    all arrays, except in point-to-point messages up to 128 KiB."""
    cma_bytes: int | None = _setting("cma_bytes", None, int)
    """In gather, all_gather, all_to_all, scatter among more than two ranks, and point-to-point (above the 128 KiB of
    eager messages), the kernel copies blocks of at least this size directly from the memory of the sending process
    (cross-memory attach). None: only blocks of at least 2 MiB in huge pages (messages: 256 KiB), since in other pages
    two copies are faster."""
    oversubscribed: bool | None = _setting("oversubscribed", None, _flag)
    """Whether ranks outnumber cores: then waiting ranks yield early. None: detected at connect."""
    transport: str | None = _setting("transport", None, _optional)
    """The transport that connects the ranks, the same on all of them: "shm" on one machine, "mpi" between hosts (with
    shared memory inside each). None: chosen from how the ranks were launched."""
    algorithm: str = _setting("algorithm", "", str)
    """Between hosts: the algorithm for the collectives that have it (`ringcomm algorithms` lists them), or "mpi" for
    MPI's own collectives. Empty: the fastest for each call, by the cost model."""
    link_latency: float = _setting("link_latency", 20.0, float)
    """Microseconds that the shortest message between hosts takes. Parameter of the cost model."""
    link_bandwidth: float = _setting("link_bandwidth", 10.0, float)
    """GB/s of a host's link to the others. `ringcomm simulate --latency --bandwidth` shows the effect of both."""
    host_id: str = _setting("host_id", "", str)
    """Under MPI, ranks with different ids count as ranks of different hosts. All ranks must set one, or none."""
    kernels: str = _setting("kernels", "", str)
    """"portable", "avx2" or "avx512"; empty for the best of this CPU. All open communicators of a process share it."""
    log: str = _setting("log", "", str)
    """The level of the logger "ringcomm": debug, info, warning or error. Empty: leave the program's setting (default:
    warning)."""

    # Not in __init__: that of a dataclass refuses an unknown name without the nearest known one.
    def __new__(cls, *_: Any, **given: Any) -> Self:
        known = [f.name for f in fields(cls)]
        variables = [TUNING, *(PREFIX + name.upper() for name in known)]
        for name in given:
            if name not in known:
                raise unknown("setting", name, known)
        for name in os.environ:
            if name.startswith(PREFIX) and name not in (*LAUNCHER, *variables):
                raise unknown("environment variable", name, variables)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, unit in (("timeout", "seconds"), ("link_latency", "microseconds"), ("link_bandwidth", "GB/s")):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise refuse(name, f"a finite number of {unit} > 0", repr(value))
        for name, least in LEAST_BYTES.items():
            value = getattr(self, name)
            if value is not None or name not in MEASURED:
                integer(name, value, least)
        for name in TEXTS:
            if not isinstance(getattr(self, name), str):
                raise refuse(name, "a string", repr(getattr(self, name)))
        if not isinstance(self.transport, str | None):
            raise refuse("transport", "a name, or None", repr(self.transport))
        if self.log and self.log.upper() not in logging.getLevelNamesMapping():
            raise unknown("log level", self.log, ["debug", "info", "warning", "error"])


_logging = threading.Lock()  # ranks may be threads


def start_logging(level: str) -> None:
    """Set the level of the logger "ringcomm"; add a handler for stderr if the program has none."""
    logger = logging.getLogger("ringcomm")
    with _logging:
        if level:
            logger.setLevel(level.upper())
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("ringcomm %(levelname)s: %(message)s"))
            logger.addHandler(handler)
