"""Reads the files of a trace, and leaves out headers and entries whose checksum is wrong: no damage is reported."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.errors import ArgumentError, refuse
from ringcomm.trace.recorder import DROPPED, HEADER_BYTES, PIECE_BYTES, SUFFIX, VERSION, checksum
from ringcomm.types import COLLECTIVES

__all__ = ["MARK", "NAMES", "ON_GPU", "WAIT", "Clock", "TraceFile", "checksums", "read_files"]

log = logging.getLogger("ringcomm")

# TraceEntry of bindings/src/core/trace.h
ENTRY = np.dtype(
    [
        *((name, "<u8") for name in ("signature", "start", "end", "count", "epoch", "waited")),
        *(("path", "<u4"), ("late", "<i2"), ("status", "i1"), ("queued", "u1"), ("waited_256", "<u4")),
        ("checksum", "<u4"),
    ]
)
FACTORS = np.cumprod(np.full(8, 0x9E3779B97F4A7C15, np.uint64))  # FACTORS of bindings/src/core/trace.cpp
NAMES = (*COLLECTIVES, "send", "recv", "recv", "probe")
WAIT, CLOCK, MARK = 2**64 - 3, 2**64 - 2, 2**64 - 1
ON_GPU = 2  # of `queued`


@dataclass(slots=True)
class TraceFile:
    """The facts of the header of a file, and the whole entries in it, apart from those for the clock."""

    path: Path
    facts: dict[str, Any]
    entries: NDArray[Any]
    samples: NDArray[Any]  # of the clock


class Clock:
    """Turns the ticks of a host into seconds, by the first and the last sample of both."""

    def __init__(self, samples: NDArray[Any]) -> None:
        samples = np.sort(samples, order="start")
        self.origin = samples["start"][0]
        ticks, ns = samples["start"] - self.origin, samples["count"]
        self.seconds = float(ns[-1] - ns[0]) / max(float(ticks[-1]), 1.0) * 1e-9  # of a tick
        self.at = float(ns[0]) * 1e-9

    def times(self, entries: NDArray[Any], name: str) -> NDArray[np.float64]:
        ticks = entries[name]
        seconds = self.at + (ticks - self.origin).astype(np.int64) * self.seconds
        on_gpu = (entries["queued"] == ON_GPU) & (entries["signature"] < WAIT)
        return np.where(on_gpu, ticks * 1e-9, seconds)


def read_files(folder: Path) -> tuple[list[TraceFile], dict[str, Clock]]:
    """Return the files of a folder, and the clock of each host, from the first entries of each of its files.

    Files that are not traces, and damaged entries, are left out, with a warning. Raises ArgumentError if none is left.
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
    return files, _clocks(files)


def _read(path: Path) -> TraceFile:
    try:
        data = path.read_bytes()
        facts = json.loads(data[: DROPPED.start])
        version = facts["version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise refuse("file", "a trace", str(path)) from None
    if version != VERSION:
        raise refuse(f"version of {path}", VERSION, version)
    if facts.pop("checksum", None) != checksum(facts):
        raise refuse("file", "a trace", str(path))
    facts["dropped"] = int.from_bytes(data[DROPPED], "little")
    body = data[HEADER_BYTES:]
    entries = np.frombuffer(body[: len(body) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)
    entries = entries[entries["end"] != 0]
    if not body or len(body) % PIECE_BYTES:
        what = f"of rank {facts['rank']} of group {facts['group']} anything after the first {len(entries):,} entries"
        log.warning("%s was cut short: %s is missing", path, what)
    whole = entries[checksums(entries) == entries["checksum"]]
    if damaged := len(entries) - len(whole):  # one may be half written, if its job still runs
        log.warning("%s: left out %d of %d entries, which are damaged", path, damaged, len(entries))
    is_sample = whole["signature"] == CLOCK
    return TraceFile(path, facts, whole[~is_sample], whole[is_sample])


def checksums(entries: NDArray[Any]) -> NDArray[np.uint64]:
    """Return what those of entries must be: see checksum_of() in bindings/src/core/trace.cpp."""
    words = np.ascontiguousarray(entries).view(np.uint64).reshape(-1, len(FACTORS)) * FACTORS
    words[:, -1] = entries["waited_256"] * FACTORS[-1]  # without the checksum
    sums: NDArray[np.uint64] = words.sum(1, dtype=np.uint64) >> np.uint64(32)
    return sums


def _clocks(files: Sequence[TraceFile]) -> dict[str, Clock]:
    """Return the clock of each host that has one."""
    clocks = {}
    for host in dict.fromkeys(file.facts["host"] for file in files):
        of_host = [file for file in files if file.facts["host"] == host]
        samples = np.concatenate([file.samples for file in of_host])
        if len(samples) > 1:
            clocks[host] = Clock(samples)
        elif any(len(file.entries) for file in of_host):
            log.warning("left out: all entries of host %s, as its clock samples are damaged", host)
    return clocks
