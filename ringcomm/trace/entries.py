"""Reads the files of a trace: calls with their times in seconds, of all ranks by one clock."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.errors import refuse
from ringcomm.native import lib
from ringcomm.trace.recorder import HEADER_BYTES, SUFFIX, VERSION
from ringcomm.transports.core import PATHS
from ringcomm.types import COLLECTIVES, DTYPES

__all__ = ["Call", "Recording", "read"]

# TraceEntry of bindings/src/core/trace.h
ENTRY = np.dtype(
    [
        *((name, "<u8") for name in ("signature", "start", "end", "count", "epoch", "waited", "path")),
        *(("late", "<i2"), ("status", "i1"), ("queued", "u1"), ("waited_256", "<u4")),
    ]
)
NAMES = (*COLLECTIVES, "send", "recv", "recv", "probe")
WAIT, CLOCK, MARK = 2**64 - 3, 2**64 - 2, 2**64 - 1
NAME_AT = 24  # bytes, in the entry of a mark
TOGETHER = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # no rank ends before all have begun


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
    """The calls of one rank of one group; `process` is the same for all groups of a rank."""

    group: str
    rank: int
    size: int
    host: str
    process: str
    calls: list[Call] = field(default_factory=list)


def read(folder: Path) -> list[Recording]:
    """Return the recordings in a folder, the largest groups first, with times from the first call on.

    Raises ArgumentError if there is none.
    """
    files = [_read(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    clocks = {host: _Clock(each for facts, each in files if facts["host"] == host) for host in _hosts(files)}
    ranks: dict[tuple[str, str], set[tuple[str, int]]] = defaultdict(set)
    for facts, _ in files:
        ranks[facts["host"], facts["pid"]].add((facts["group"], facts["rank"]))
    recordings: dict[tuple[str, int, str], Recording] = {}  # a rank may have recorded a group more than once
    for facts, entries in files:
        group, host, pid = facts["group"], facts["host"], facts["pid"]
        threads = len({rank for each, rank in ranks[host, pid] if each == group}) > 1
        process = f"{host} {pid}" + (f" {facts['thread']}" if threads else "")
        recording = Recording(group, facts["rank"], facts["size"], host, process)
        calls = recordings.setdefault((group, facts["rank"], process), recording).calls
        calls += _calls(entries, clocks[host])
    found = [each for each in recordings.values() if each.calls]
    for each in found:
        each.calls.sort(key=lambda call: call.start)
    if not found:
        raise refuse("folder", "one with traces of calls, as RINGCOMM_TRACE makes", str(folder))
    _align(found)
    first = min(call.start for each in found for call in each.calls)
    _shift(found, dict.fromkeys({each.host for each in found}, -first))
    return sorted(found, key=lambda each: (-each.size, each.group, each.rank))


def _read(path: Path) -> tuple[dict[str, Any], NDArray[Any]]:
    data = path.read_bytes()
    try:
        facts = json.loads(data[:HEADER_BYTES])
        version = facts["version"]
    except (ValueError, KeyError, TypeError):
        raise refuse("file", "a trace", str(path)) from None
    if version != VERSION:
        raise refuse(f"version of {path}", VERSION, version)
    body = data[HEADER_BYTES:]
    entries = np.frombuffer(body[: len(body) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)
    return facts, entries[entries["end"] != 0]


def _hosts(files: Sequence[tuple[dict[str, Any], NDArray[Any]]]) -> list[str]:
    return list(dict.fromkeys(facts["host"] for facts, _ in files))


class _Clock:
    """Turns the ticks of a host into seconds by pairs of both, of which the outermost tell most."""

    def __init__(self, files: Iterable[NDArray[Any]]) -> None:
        clocks = np.concatenate([entries[entries["signature"] == CLOCK] for entries in files])
        clocks.sort(order="start")
        if not len(clocks):
            return  # nor are there other entries
        self.origin = clocks["start"][0]
        ticks, ns = clocks["start"] - self.origin, clocks["count"]
        self.seconds = float(ns[-1] - ns[0]) / max(float(ticks[-1]), 1.0) * 1e-9  # of a tick
        self.at = float(ns[0]) * 1e-9

    def times(self, ticks: NDArray[Any]) -> list[float]:
        times: list[float] = (self.at + (ticks - self.origin).astype(np.int64) * self.seconds).tolist()
        return times


def _calls(entries: NDArray[Any], clock: _Clock) -> Iterator[Call]:
    entries = entries[entries["signature"] != CLOCK]
    if not len(entries):
        return
    starts, ends = clock.times(entries["start"]), clock.times(entries["end"])
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
        yield Call(
            NAMES[code],
            "message" if is_message else "collective",
            start,
            end,
            count * int(lib.rc_dtype_bytes(dtype)),
            [*DTYPES][dtype] if count else "",
            root if root >= 0 else None,
            epoch,
            "" if is_message else (*PATHS, "program")[path],
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
            if call.name in TOGETHER and not call.failed:
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
