"""Reads the files of a trace, and leaves out what no rank can have written: damaged data is never reported."""

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
SAMPLES = 3  # of the clock: two as a trace begins, and one as it ends
TICK_NS = (0.1, 2.0)  # that of any machine lies between
SLEW = 0.1  # of a clock that is being adjusted: chrony slews by up to 8.3 %
JITTER = 1e-3  # seconds, of a sample that was interrupted
GPU_JITTER = 0.05  # seconds, between the clocks of the host and a GPU
PREEMPTED = 1.0  # seconds between the end of a call and its entry, at most
LONGEST = 86400.0  # seconds, of a call


@dataclass(slots=True)
class TraceFile:
    """The facts of the header of a file, and the entries in it that are whole, but those for the clock."""

    path: Path
    facts: dict[str, Any]
    entries: NDArray[Any]
    samples: NDArray[Any]  # of the clock
    found: int  # entries in the file, damaged ones included


class Clock:
    """Turns the ticks of a host into seconds by pairs of both, of which the outermost tell most."""

    def __init__(self, samples: NDArray[Any]) -> None:
        samples = np.sort(samples, order="start")
        self.origin = samples["start"][0]
        ticks, ns = samples["start"] - self.origin, samples["count"]
        self.seconds = float(ns[-1] - ns[0]) / max(float(ticks[-1]), 1.0) * 1e-9  # of a tick
        self.at = float(ns[0]) * 1e-9

    def times(self, entries: NDArray[Any], name: str) -> NDArray[np.float64]:
        ticks = entries[name]
        seconds = self.at + (ticks - self.origin).astype(np.int64) * self.seconds
        return np.where(_on_gpu(entries), ticks * 1e-9, seconds)


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
    clocks = _clocks(files)
    for file in files:
        if clock := clocks.get(file.facts["host"]):
            file.entries = file.entries[_in_time(file, clock)]
            # One may be half written, if its job still runs.
            if damaged := file.found - len(file.entries) - len(file.samples):
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
    is_sample = known["signature"] == CLOCK
    return TraceFile(path, facts, known[~is_sample], known[is_sample], len(entries))


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
    is_call &= (entries["path"] < MAX_COUNT * len(PATHS)) & (late >= -1) & (late < size)
    is_call &= (waited <= took) & (entries["waited_256"] <= waited // 256)
    known: NDArray[np.bool_] = (entries["start"] <= entries["end"]) & (is_call | (signature >= WAIT))
    return known


def _clocks(files: Sequence[TraceFile]) -> dict[str, Clock]:
    """Return the clock of each host that has one; a damaged sample is taken out of its file."""
    clocks = {}
    for host in dict.fromkeys(file.facts["host"] for file in files):
        of_host = [file for file in files if file.facts["host"] == host]
        samples = np.concatenate([file.samples for file in of_host])
        agree = _agree(samples)
        if agree.sum() > 1:
            clocks[host] = Clock(samples[agree])
            ends = np.cumsum([len(file.samples) for file in of_host])[:-1]
            for file, whole in zip(of_host, np.split(agree, ends), strict=True):
                file.samples = file.samples[whole]
        elif any(len(file.entries) for file in of_host):
            log.warning("left out: all entries of host %s, as its clock samples are damaged", host)
    return clocks


def _agree(samples: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which samples of a clock agree with most others on how fast it goes, and what it shows."""
    others = samples[:: max(1, len(samples) // 32)]  # which is enough to find the majority
    ticks = (samples["start"][:, None] - others["start"]).astype(np.int64)
    ns = (samples["count"][:, None] - others["count"]).astype(np.int64)
    slowest, fastest = np.array(TICK_NS)[:, None, None] * np.abs(ticks)
    close = JITTER * 1e9
    agree = (np.abs(ns) >= slowest - close) & (np.abs(ns) <= fastest + close)
    agree &= ((ns < 0) == (ticks < 0)) | (np.abs(ns) < close)
    far = agree & (np.abs(ns) > close)
    if far.any():
        rate = np.median(ns[far] / ticks[far])
        agree &= np.abs(ns - ticks * rate) <= close + SLEW * np.abs(ns)
    majority: NDArray[np.bool_] = 2 * agree.sum(1) > len(others)
    return majority


def _in_time(file: TraceFile, clock: Clock) -> NDArray[np.bool_]:
    """Return which entries lie between the first clock sample of their file and the last one, and in their order.

    Calls are added as they end, so later entries bound the end of a call. The file of a rank that was killed, or still
    runs, goes on after its last sample: nothing bounds its last call there, and it may have been long.
    """
    entries, samples = file.entries, file.samples
    starts, ends = clock.times(entries, "start"), clock.times(entries, "end")
    on_gpu = _on_gpu(entries)
    in_time: NDArray[np.bool_] = (starts <= ends) & (ends - starts <= LONGEST)
    sampled = np.sort(clock.times(samples, "start"))
    sampled_ns = np.sort(samples["count"]) * 1e-9
    if len(samples) > 1:
        in_time &= starts >= np.where(on_gpu, sampled_ns[0] - GPU_JITTER, sampled[0] - JITTER)
    if len(samples) == SAMPLES:
        in_time &= ends <= np.where(on_gpu, sampled_ns[-1] + GPU_JITTER, sampled[-1] + JITTER)
    bounds = np.where(in_time & ~on_gpu, ends, np.inf)  # calls on a GPU are added some time after they end
    earliest = np.minimum.accumulate(bounds[::-1])[::-1]
    in_time &= ends <= np.append(earliest[1:], np.inf) + PREEMPTED
    return in_time


def _on_gpu(entries: NDArray[Any]) -> NDArray[np.bool_]:
    on_gpu: NDArray[np.bool_] = (entries["queued"] == ON_GPU) & (entries["signature"] < WAIT)
    return on_gpu
