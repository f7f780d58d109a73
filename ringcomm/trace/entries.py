"""Reads the files of a trace: calls with their times in seconds, of all ranks by one clock."""

import json
from collections import defaultdict
from collections.abc import Iterator
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
AT_MOST = len(NAMES) - 2  # whose count is in bytes
WAIT, CLOCK, MARK = 2**64 - 3, 2**64 - 2, 2**64 - 1
TOGETHER = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # no rank ends before all have begun


@dataclass(slots=True)
class Call:
    """A call of one rank; times in seconds.

    Attributes:
        name: of the call, "wait" for that for a queued one, or what `mark` was given
        kind: "collective", "message", "wait" or "mark"
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
    """The calls of one rank of one group."""

    group: str
    rank: int
    size: int
    host: str
    pid: int
    calls: list[Call] = field(default_factory=list)


def read(folder: Path) -> list[Recording]:
    """Return the recordings in a folder, by group and rank, with times from the first call on.

    Raises ArgumentError if there is none.
    """
    recordings = [_read(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    recordings = [each for each in recordings if each.calls]
    if not recordings:
        raise refuse("folder", "one with traces of calls, as RINGCOMM_TRACE makes", str(folder))
    _align(recordings)
    first = min(call.start for each in recordings for call in each.calls)
    _shift(recordings, dict.fromkeys({each.host for each in recordings}, -first))
    return sorted(recordings, key=lambda each: (-each.size, each.group, each.rank))


def _read(path: Path) -> Recording:
    data = path.read_bytes()
    try:
        facts = json.loads(data[:HEADER_BYTES])
        if facts["version"] != VERSION:
            raise refuse(f"version of {path}", VERSION, facts["version"])
    except (json.JSONDecodeError, KeyError, TypeError):
        raise refuse("file", "a trace", str(path)) from None
    body = data[HEADER_BYTES:]
    entries = np.frombuffer(body[: len(body) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)
    used = entries[entries["end"] != 0]
    clocks = used[used["signature"] == CLOCK]
    recording = Recording(facts["group"], facts["rank"], facts["size"], facts["host"], facts["pid"])
    if len(clocks) > 1:
        recording.calls = [*_calls(used[used["signature"] != CLOCK], _Clock(clocks))]
    return recording


class _Clock:
    """Turns ticks into seconds by pairs of both, of which the outermost tell most."""

    def __init__(self, clocks: NDArray[Any]) -> None:
        ticks, ns = clocks["start"].astype(np.float64), clocks["count"].astype(np.float64)
        self.seconds = (ns[-1] - ns[0]) / max(ticks[-1] - ticks[0], 1.0) * 1e-9  # of a tick
        self.origin, self.at = int(clocks["start"][0]), ns[0] * 1e-9

    def time(self, ticks: int) -> float:
        return float(self.at + (ticks - self.origin) * self.seconds)


def _calls(entries: NDArray[Any], clock: _Clock) -> Iterator[Call]:
    for entry in entries:
        signature, start, end = int(entry["signature"]), clock.time(int(entry["start"])), clock.time(int(entry["end"]))
        if signature == MARK:
            name = entry.tobytes()[24:].partition(b"\0")[0].decode(errors="replace")
            yield Call(name, "mark", start, start)
            continue
        if signature == WAIT:
            yield Call("wait", "wait", start, end)
            continue
        code, dtype, root = signature & 255, signature >> 8 & 255, (signature >> 32 & 0xFFFFFF) - 1
        is_message = code >= len(COLLECTIVES)
        chunks, path = divmod(int(entry["path"]), len(PATHS) + 1)
        late = int(entry["late"])
        yield Call(
            NAMES[code],
            "message" if is_message else "collective",
            start,
            end,
            int(entry["count"]) * (1 if code == AT_MOST else int(lib.rc_dtype_bytes(dtype))),
            "" if code == AT_MOST else [*DTYPES][dtype],
            root if root >= 0 else None,
            int(entry["epoch"]),
            "" if is_message else (*PATHS, "program")[path],
            chunks,
            int(entry["waited"]) * clock.seconds,
            None if late < 0 else late,
            int(entry["waited_256"]) * 256 * clock.seconds,
            bool(entry["queued"]),
            bool(entry["status"]),
        )


def _align(recordings: list[Recording]) -> None:
    """Bring the clocks of all hosts together: a collective in which all wait for all ends everywhere at about one time."""
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
