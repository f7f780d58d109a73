"""Reads the files of a trace: calls with their times in seconds, of all ranks by one clock."""

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.errors import ArgumentError, refuse
from ringcomm.native import lib
from ringcomm.trace.jobs import check_one_job, members_of
from ringcomm.trace.recorder import DROPPED, HEADER_BYTES, PIECE_BYTES, SUFFIX, VERSION
from ringcomm.transports.core import PATHS
from ringcomm.types import COLLECTIVES, DTYPES

__all__ = ["Call", "Recording", "read"]

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
NAME_AT = 24  # bytes, in the entry of a mark
TOGETHER = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # no rank ends before all have begun

_File = tuple[dict[str, Any], NDArray[Any]]  # the facts of its header, and its entries


@dataclass(slots=True)
class Call:
    """A call of one rank; times in seconds.

    Attributes:
        name: of the call, "wait" for that for a queued one, or what `mark` was given
        kind: "collective", "message", "wait" or "mark"
        bytes: of the larger of its arrays
        root: the root, or the peer of a message
        waited: for other ranks
        late: the rank for which it waited longest, None: for none; `waited_for` is how long
        queued: whether the program went on meanwhile
        path: "cuda" for a call on GPUs, which has no epoch
    """

    name: str
    kind: str
    start: float
    end: float
    bytes: int = 0
    dtype: str = ""
    root: int | None = None
    epoch: int = 0
    path: str = ""
    chunks: int = 0
    waited: float = 0.0
    late: int | None = None
    waited_for: float = 0.0
    queued: bool = False
    failed: bool = False


@dataclass(slots=True)
class Recording:
    """The calls of one rank of one group.

    Attributes:
        job_rank, job_size: its rank among all ranks of the job
        process: the same for all groups of a rank, but another one once the rank has been started again
        memcpy: what the rank copied in memory when it began, in GB/s
        dropped: the number of calls for which the disk had no room
    """

    group: str
    rank: int
    size: int
    job_rank: int
    job_size: int
    host: str
    process: str
    pid: int
    memcpy: float
    dropped: int = 0
    calls: list[Call] = field(default_factory=list)


def read(folder: Path) -> list[Recording]:
    """Return the recordings in a folder, the groups in the order of their first calls, with times from the first on.

    A file that is no trace is left out, with a warning, and so is a group without calls. Raises ArgumentError if there
    is no other, or if they are of several jobs.
    """
    files = _read_all(folder)
    check_one_job(folder, [facts for facts, _ in files])
    clocks = _clocks(files)
    files = [(facts, entries) for facts, entries in files if facts["host"] in clocks or not len(entries)]
    members = members_of([facts for facts, _ in files])
    recordings: dict[tuple[str, int, str], Recording] = {}  # a rank may have recorded a group more than once
    for (facts, entries), member in zip(files, members, strict=True):
        group, rank, host, process = facts["group"], facts["rank"], facts["host"], member.process
        of_group, of_job = (group, rank, facts["size"]), (member.rank, member.size)
        recording = Recording(*of_group, *of_job, host, process, facts["pid"], facts["memcpy"])
        recording = recordings.setdefault((group, rank, process), recording)
        if len(entries):
            recording.calls += _calls(entries, clocks[host])
        recording.dropped += facts["dropped"]
    used = {each.group for each in recordings.values() if each.calls}
    found = [each for each in recordings.values() if each.group in used]
    if not found:
        raise refuse("folder", "one with traces of calls, as RINGCOMM_TRACE makes", str(folder))
    for each in found:
        each.calls.sort(key=lambda call: call.start)
    _align(found)
    first = {group: min(each.calls[0].start for each in found if each.group == group and each.calls) for group in used}
    _shift(found, dict.fromkeys({each.host for each in found}, -min(first.values())))
    return sorted(found, key=lambda each: (first[each.group], each.group, each.rank))


def _read_all(folder: Path) -> list[_File]:
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
    return files


def _read(path: Path) -> _File:
    try:
        data = path.read_bytes()
        facts = json.loads(data[: DROPPED.start])
        version = facts["version"]
    except (OSError, ValueError, KeyError, TypeError):
        raise refuse("file", "a trace", str(path)) from None
    if version != VERSION:
        raise refuse(f"version of {path}", VERSION, version)
    if not all(isinstance(facts.get(name), kind) for kind, names in FACTS.items() for name in names):
        raise refuse("file", "a trace", str(path))
    facts["dropped"] = int.from_bytes(data[DROPPED], "little")
    body = data[HEADER_BYTES:]
    entries = np.frombuffer(body[: len(body) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)
    entries = entries[entries["end"] != 0]
    if not body or len(body) % PIECE_BYTES:
        what = f"of rank {facts['rank']} of group {facts['group']} anything after the first {len(entries):,} entries"
        log.warning("%s was cut short: %s is missing", path, what)
    known = _known(entries)
    if unknown := len(known) - int(known.sum()):  # one may be half written, if its job still runs
        log.warning("%s: left out %d of %d entries, which are damaged", path, unknown, len(known))
    return facts, entries[known]


def _known(entries: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which entries hold what a rank may have written."""
    signature = entries["signature"]
    is_call = (signature & 255 < len(NAMES)) & (signature >> 8 & 255 < len(DTYPES))
    known: NDArray[np.bool_] = (entries["start"] <= entries["end"]) & (is_call | (signature >= WAIT))
    return known


def _clocks(files: Sequence[_File]) -> dict[str, "_Clock"]:
    """Return the clock of each host that has one; a file begins with an entry for it."""
    clocks = {}
    for host in dict.fromkeys(facts["host"] for facts, _ in files):
        entries = np.concatenate([each for facts, each in files if facts["host"] == host])
        known = entries[entries["signature"] == CLOCK]
        if len(known):
            clocks[host] = _Clock(known)
        elif len(entries):
            log.warning("left out: what is of host %s, as its entries for the clock are damaged", host)
    return clocks


class _Clock:
    """Turns the ticks of a host into seconds by pairs of both, of which the outermost tell most."""

    def __init__(self, clocks: NDArray[Any]) -> None:
        clocks.sort(order="start")
        self.origin = clocks["start"][0]
        ticks, ns = clocks["start"] - self.origin, clocks["count"]
        self.seconds = float(ns[-1] - ns[0]) / max(float(ticks[-1]), 1.0) * 1e-9  # of a tick
        self.at = float(ns[0]) * 1e-9

    def times(self, entries: NDArray[Any], name: str) -> list[float]:
        ticks = entries[name]
        seconds = self.at + (ticks - self.origin).astype(np.int64) * self.seconds
        on_gpu = (entries["queued"] == ON_GPU) & (entries["signature"] < WAIT)
        times: list[float] = np.where(on_gpu, ticks * 1e-9, seconds).tolist()
        return times


def _calls(entries: NDArray[Any], clock: _Clock) -> Iterator[Call]:
    entries = entries[entries["signature"] != CLOCK]
    starts, ends = clock.times(entries, "start"), clock.times(entries, "end")
    for entry, row, start, end in zip(entries, entries.tolist(), starts, ends, strict=True):
        signature, _, _, count, epoch, waited, chunks, late, status, queued, waited_256 = row
        if signature == MARK:
            name = entry.tobytes()[NAME_AT:].partition(b"\0")[0].decode(errors="replace")
            yield Call(name, "mark", start, start)
            continue
        if signature == WAIT:
            yield Call("wait", "wait", start, end)
            continue
        code, dtype, root = signature & 255, signature >> 8 & 255, (signature >> 32 & 0xFFFFFF) - 1
        is_message = code >= len(COLLECTIVES)
        chunks, path = divmod(chunks, len(PATHS) + 1)
        paths = ("cuda",) if queued == ON_GPU else (*PATHS, "program")
        yield Call(
            NAMES[code],
            "message" if is_message else "collective",
            start,
            end,
            count * int(lib.rc_dtype_bytes(dtype)),
            [*DTYPES][dtype] if count else "",
            root if root >= 0 else None,
            epoch,
            "" if is_message else paths[path],
            chunks,
            waited * clock.seconds,
            None if late < 0 else late,
            waited_256 * 256 * clock.seconds,
            bool(queued),
            bool(status),
        )


def _align(recordings: list[Recording]) -> None:
    """Bring the clocks of all hosts together: a collective in which all wait for all ends everywhere at once."""
    ends: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)  # by group and epoch, of each host
    for each in recordings:
        for call in each.calls:
            if call.name in TOGETHER and call.epoch and not call.failed:
                ends[each.group, call.epoch].setdefault(each.host, call.end)
    hosts = list(dict.fromkeys(each.host for each in recordings))
    offsets = {hosts[0]: 0.0}
    while missing := [host for host in hosts if host not in offsets]:
        found = False
        for host in missing:
            differences = [
                times[known] + offsets[known] - times[host]
                for times in ends.values()
                for known in offsets
                if host in times and known in times
            ]
            if differences:
                offsets[host], found = float(np.median(differences)), True
        if not found:
            break  # they had no such call in common
    _shift(recordings, offsets)


def _shift(recordings: list[Recording], offsets: dict[str, float]) -> None:
    for each in recordings:
        if offset := offsets.get(each.host, 0.0):
            for call in each.calls:
                call.start += offset
                call.end += offset
