"""Reads the files of a trace, and leaves out what no rank can have written: a damaged disk must not pass for facts."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.bootstrap.place import MAX_SIZE
from ringcomm.errors import ArgumentError, refuse
from ringcomm.trace.recorder import DROPPED, HEADER_BYTES, PIECE_BYTES, SUFFIX, VERSION
from ringcomm.transports.core import PATHS
from ringcomm.types import COLLECTIVES, DTYPES

__all__ = ["MARK", "NAMES", "ON_GPU", "WAIT", "Clock", "TraceFile", "read_files"]

log = logging.getLogger("ringcomm")

# TraceEntry of bindings/src/core/trace.h
ENTRY = np.dtype(
    [
        *((name, "<u8") for name in ("signature", "start", "end", "count", "epoch", "waited", "path")),
        *(("late", "<i2"), ("status", "i1"), ("queued", "u1"), ("waited_256", "<u4")),
    ]
)
FACTS = {
    str: ("group", "job", "host", "process"),
    int: ("rank", "size", "job_rank", "job_size", "pid"),
    float: ("memcpy",),
}
NAMES = (*COLLECTIVES, "send", "recv", "recv", "probe")
WAIT, CLOCK, MARK = 2**64 - 3, 2**64 - 2, 2**64 - 1
ON_GPU = 2  # of `queued`
MAX_COUNT = 1 << 48  # of elements: more is damage
LOOKS = 3  # at the clock: two as a trace begins, and one as it ends
TICK_NS = (0.1, 2.0)  # that of any machine lies between
SLEW = 1e-3  # of a clock that is being adjusted: twice the most, 500 ppm
JITTER = 1e-3  # seconds, of a look at the clock that was interrupted
PREEMPTED = 1.0  # seconds between the end of a call and its entry, at most


@dataclass(slots=True)
class TraceFile:
    """The facts of the header of a file, and the entries in it that are whole, but those for the clock."""

    path: Path
    facts: dict[str, Any]
    entries: NDArray[Any]
    looks: NDArray[Any]  # at the clock
    found: int  # entries, with those that are damaged


class Clock:
    """Turns the ticks of a host into seconds by pairs of both, of which the outermost tell most."""

    def __init__(self, looks: NDArray[Any]) -> None:
        looks = np.sort(looks, order="start")
        self.origin = looks["start"][0]
        ticks, ns = looks["start"] - self.origin, looks["count"]
        self.seconds = float(ns[-1] - ns[0]) / max(float(ticks[-1]), 1.0) * 1e-9  # of a tick
        self.at = float(ns[0]) * 1e-9

    def times(self, entries: NDArray[Any], name: str) -> NDArray[np.float64]:
        ticks = entries[name]
        seconds = self.at + (ticks - self.origin).astype(np.int64) * self.seconds
        return np.where(_on_gpu(entries), ticks * 1e-9, seconds)


def read_files(folder: Path) -> tuple[list[TraceFile], dict[str, Clock]]:
    """Return the files of a folder, and the clock of each host, from the first entries of each of its files.

    What is no trace, and what is damaged, is left out, with a warning. Raises ArgumentError if nothing is left.
    """
    files, failures = [], []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            files.append(_read(path))
        except ArgumentError as error:
            failures.append(error)
    if failures and not files:
        raise failures[0]
    for failure in failures:
        log.warning("left out: %s", failure)
    clocks = _clocks(files)
    for file in files:
        if clock := clocks.get(file.facts["host"]):
            file.entries = file.entries[_in_time(file, clock)]
            # One may be half written, if its job still runs.
            if damaged := file.found - len(file.entries) - len(file.looks):
                log.warning("%s: left out %d of %d entries, which are damaged", file.path, damaged, file.found)
    return files, clocks


def _read(path: Path) -> TraceFile:
    try:
        data = path.read_bytes()
        facts = json.loads(data[: DROPPED.start])
        version = facts["version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise refuse("file", "a trace", str(path)) from None
    if version != VERSION:
        raise refuse(f"version of {path}", VERSION, version)
    if not _possible(facts):
        raise refuse("file", "a trace", str(path))
    facts["dropped"] = int.from_bytes(data[DROPPED], "little")
    body = data[HEADER_BYTES:]
    entries = np.frombuffer(body[: len(body) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)
    entries = entries[entries["end"] != 0]
    if not body or len(body) % PIECE_BYTES:
        what = f"of rank {facts['rank']} of group {facts['group']} anything after the first {len(entries):,} entries"
        log.warning("%s was cut short: %s is missing", path, what)
    known = entries[_known(entries, facts["size"])]
    is_look = known["signature"] == CLOCK
    return TraceFile(path, facts, known[~is_look], known[is_look], len(entries))


def _possible(facts: dict[str, Any]) -> bool:
    """Return whether a header has the facts that a rank may have written."""
    return (
        all(isinstance(facts.get(name), kind) for kind, names in FACTS.items() for name in names)
        and all(facts[name].isprintable() for name in FACTS[str])
        and 0 <= facts["rank"] < facts["size"] <= MAX_SIZE
        and 0 <= facts["job_rank"] < facts["job_size"] <= MAX_SIZE
        and 0 < facts["memcpy"] < math.inf
    )


def _known(entries: NDArray[Any], size: int) -> NDArray[np.bool_]:
    """Return which entries hold what a rank of a group of this size may have written, whatever the time."""
    signature, took = entries["signature"], entries["end"] - entries["start"]
    queued, waited, late = entries["queued"], entries["waited"], entries["late"]
    is_call = (signature & 255 < len(NAMES)) & (signature >> 8 & 255 < len(DTYPES)) & (signature < WAIT)
    is_call &= (signature >> 32 & 0xFFFFFF <= size) & (entries["count"] < MAX_COUNT)
    is_call &= (queued <= ON_GPU) & ((queued < ON_GPU) | (entries["path"] == 0))
    is_call &= (entries["path"] < MAX_COUNT * (len(PATHS) + 1)) & (late >= -1) & (late < size)
    is_call &= (waited <= took) & (entries["waited_256"] <= waited // 256)
    known: NDArray[np.bool_] = (entries["start"] <= entries["end"]) & (is_call | (signature >= WAIT))
    return known


def _clocks(files: Sequence[TraceFile]) -> dict[str, Clock]:
    """Return the clock of each host that has one; a damaged look at it is taken out of its file."""
    clocks = {}
    for host in dict.fromkeys(file.facts["host"] for file in files):
        of_host = [file for file in files if file.facts["host"] == host]
        looks = np.concatenate([file.looks for file in of_host])
        agree = _agree(looks)
        if agree.sum() > 1:
            clocks[host] = Clock(looks[agree])
            ends = np.cumsum([len(file.looks) for file in of_host])[:-1]
            for file, whole in zip(of_host, np.split(agree, ends), strict=True):
                file.looks = file.looks[whole]
        elif any(len(file.entries) for file in of_host):
            log.warning("left out: what is of host %s, as its entries for the clock are damaged", host)
    return clocks


def _agree(looks: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which looks at a clock agree with most others on how fast it goes, and what it shows."""
    others = looks[:: max(1, len(looks) // 32)]  # which is enough to find the majority
    ticks = (looks["start"][:, None] - others["start"]).astype(np.int64)
    ns = (looks["count"][:, None] - others["count"]).astype(np.int64)
    least, most = np.array(TICK_NS)[:, None, None] * np.abs(ticks)
    close = JITTER * 1e9
    sane = (np.abs(ns) >= least - close) & (np.abs(ns) <= most + close)
    sane &= ((ns < 0) == (ticks < 0)) | (np.abs(ns) < close)
    agree: NDArray[np.bool_] = 2 * sane.sum(1) > len(others)
    far = agree[:, None] & sane & (np.abs(ns) > close)
    if far.any():
        rate = np.median(ns[far] / ticks[far])
        first = np.flatnonzero(agree)[0]
        ticks, ns = (ticks[:, 0] - ticks[first, 0], ns[:, 0] - ns[first, 0])
        off = ns - ticks * rate
        off -= np.median(off[agree])
        agree &= np.abs(off) <= close + SLEW * np.abs(ns)
    return agree


def _in_time(file: TraceFile, clock: Clock) -> NDArray[np.bool_]:
    """Return which entries lie between the first look at the clock and the last one.

    The file of a rank that was killed, or still runs, goes on after its last look: there its last entries tell, which
    have been added in the order in which calls ended, or nearly.
    """
    times = np.stack([clock.times(file.entries, "start"), clock.times(file.entries, "end")])
    looks = clock.times(file.looks, "start") if len(file.looks) else np.array([-math.inf])
    last = looks.max()
    if len(looks) < LOOKS and len(file.entries):
        last = max(last, np.median(times[1, -3:]) + PREEMPTED)
    between = ((times >= looks.min() - JITTER) & (times <= last + JITTER)).all(0)
    in_time: NDArray[np.bool_] = between & (times[0] <= times[1])
    return in_time


def _on_gpu(entries: NDArray[Any]) -> NDArray[np.bool_]:
    on_gpu: NDArray[np.bool_] = (entries["queued"] == ON_GPU) & (entries["signature"] < WAIT)
    return on_gpu
