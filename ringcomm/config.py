"""What can be set: argument › Config › RINGCOMM_* › `ringcomm tune` › default. Also place.py reads the environment."""

import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from ringcomm import tuning
from ringcomm.errors import integer, refuse, unknown

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
    "small_bytes": 0,
    "stream_bytes": 1,
    "direct_bytes": 1,
    "reach_bytes": 1,
}
TEXTS = ("algorithm", "host_label", "kernels", "log")
FOUND_OUT = ("stream_bytes", "reach_bytes")  # if they are None


def _flag(text: str) -> bool:
    return {"0": False, "1": True}[text]


EXPECTED = {float: "a number", int: "a whole number", _flag: "0 or 1"}


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
    """Return the file of `ringcomm tune`: the one RINGCOMM_TUNING names, none if that is empty, else in ~/.config."""
    chosen = os.environ.get(TUNING)
    if chosen is not None:
        return Path(chosen) if chosen else None
    try:
        folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError:  # this user has no home
        return None
    return Path(folder, "ringcomm", "tuning.json")


def cache_folder() -> Path:
    """Return the folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ringcomm")


def _tuned(name: str, default: T) -> T:
    path = tuning_file() if name in tuning.TUNABLE else None
    found = tuning.read(path) if path else {}
    return cast(T, integer(f"{name} in {path}", found[name], LEAST_BYTES[name])) if name in found else default


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of a communicator. A field that is not given comes from RINGCOMM_<FIELD>, else from what
    `ringcomm tune` has measured, else it has its default.

    All ranks of a world use the values of rank 0; `kernels`, `log` and `host_label` are each process's own.
    """

    timeout: float = _setting("timeout", 300.0, float)
    """Seconds a call may take, unless the call says otherwise."""
    arena_bytes: int = _setting("arena_bytes", 8 << 20, int)
    """Shared memory of one rank; more where the connections between very many ranks need it."""
    sub_arena_bytes: int = _setting("sub_arena_bytes", 1 << 20, int)
    """The same for each communicator made by `split`."""
    segment_bytes: int = _setting("segment_bytes", 256 << 10, int)
    """The most bytes of a block in a chunk of a staged collective; all of a chunk together take at most twice this."""
    small_bytes: int = _setting("small_bytes", 16 << 10, int)
    """An all_reduce up to this size is done in one synchronisation: every rank reduces everything."""
    stream_bytes: int | None = _setting("stream_bytes", None, int)
    """Blocks of at least this size are staged with non-temporal stores. None: measured at connect, on rank 0."""
    direct_bytes: int = _setting("direct_bytes", 16 << 10, int)
    """Symmetric buffers of at least this size are read and written directly; so are all arrays where the ranks are
    threads of one process, but for messages up to 128 KiB."""
    reach_bytes: int | None = _setting("reach_bytes", None, int)
    """Blocks of at least this size are copied by the kernel straight out of the memory of the process that has them, in
    gather, all_gather, scatter, all_to_all and point-to-point (above 128 KiB, up to which messages are sent at once).
    None: only blocks of at least 2 MiB in huge pages (messages: 256 KiB); in others two copies are faster."""
    oversubscribed: bool | None = _setting("oversubscribed", None, _flag)
    """More ranks than cores: waiting ranks yield early. None: found out at connect."""
    algorithm: str = _setting("algorithm", "", str)
    """Between hosts: the name of the algorithm (`ringcomm algorithms` lists them) for the collectives that have it, or
    "mpi" for what MPI itself does. Empty: the one that seems fastest, for each call."""
    link_alpha: float = _setting("link_alpha", 20.0, float)
    """Microseconds that a message between hosts takes, however short: algorithms are chosen by it."""
    link_beta: float = _setting("link_beta", 10.0, float)
    """GB/s of a host's link to the others. `ringcomm simulate --alpha --beta` tells what follows from both."""
    host_label: str = _setting("host_label", "", str)
    """Under MPI, ranks with different labels pass for ranks of different hosts. All ranks must have one, or none."""
    kernels: str = _setting("kernels", "", str)
    """"portable", "avx2", "avx512"; empty for the best of this CPU. A process has one choice as long as it has a
    communicator open."""
    log: str = _setting("log", "", str)
    """The level of the logger "ringcomm": debug, info, warning, error; empty for what the program has set, by default
    warning."""

    # Before __init__: that of a dataclass would refuse an unknown name without the nearest known one.
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
        for name, unit in (("timeout", "seconds"), ("link_alpha", "microseconds"), ("link_beta", "GB/s")):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise refuse(name, f"{unit} > 0, and an end", repr(value))
        for name, least in LEAST_BYTES.items():
            value = getattr(self, name)
            if value is not None or name not in FOUND_OUT:
                integer(name, value, least)
        for name in TEXTS:
            if not isinstance(getattr(self, name), str):
                raise refuse(name, "a string", repr(getattr(self, name)))
        if self.log and self.log.upper() not in logging.getLevelNamesMapping():
            raise unknown("log level", self.log, ["debug", "info", "warning", "error"])


_logging = threading.Lock()  # ranks may be threads


def start_logging(level: str) -> None:
    """Let the logger "ringcomm" speak from `level` on; on stderr where the program has no handlers of its own."""
    logger = logging.getLogger("ringcomm")
    with _logging:
        if level:
            logger.setLevel(level.upper())
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("ringcomm %(levelname)s: %(message)s"))
            logger.addHandler(handler)
