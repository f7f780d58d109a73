"""Reads the files of a trace: calls with their times in seconds, of all ranks by one clock."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.errors import refuse
from ringcomm.native import lib
from ringcomm.trace.files import MARK, NAMES, ON_GPU, WAIT, Clock, read_files
from ringcomm.trace.jobs import check_one_job, job_ranks_of
from ringcomm.trace.recorder import MARK_BYTES
from ringcomm.types import COLLECTIVES, DTYPES, PATHS

__all__ = ["Call", "Recording", "processes_of", "read"]

NAME_AT = 24  # bytes, in the entry of a mark


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
        process: the same for all groups of a rank, but another one after a restart of the rank
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
    files, clocks = read_files(folder)
    check_one_job(folder, [file.facts for file in files])
    files = [file for file in files if file.facts["host"] in clocks or not len(file.entries)]
    job_ranks = job_ranks_of([file.facts for file in files])
    recordings: dict[tuple[str, int, str], Recording] = {}  # a rank may have recorded a group more than once
    for file, job_rank in zip(files, job_ranks, strict=True):
        facts = file.facts
        group, rank, host, process = facts["group"], facts["rank"], facts["host"], job_rank.process
        of_group, of_job = (group, rank, facts["size"]), (job_rank.rank, job_rank.size)
        recording = Recording(*of_group, *of_job, host, process, facts["pid"], facts["memcpy"])
        recording = recordings.setdefault((group, rank, process), recording)
        if len(file.entries):
            recording.calls += _calls(file.entries, clocks[host])
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


def processes_of(recordings: Sequence[Recording]) -> dict[str, Recording]:
    """Return a recording of each process, as pictures show them: by their ranks in the job, and their first calls."""
    found: dict[str, Recording] = {}
    for each in recordings:
        found.setdefault(each.process, each)
    return dict(sorted(found.items(), key=lambda item: item[1].job_rank))


def _calls(entries: NDArray[Any], clock: Clock) -> Iterator[Call]:
    starts, ends = clock.times(entries, "start").tolist(), clock.times(entries, "end").tolist()
    for entry, row, start, end in zip(entries, entries.tolist(), starts, ends, strict=True):
        signature, _, _, count, epoch, waited, chunks, late, status, queued, waited_256, _ = row
        if signature == MARK:
            name = entry.tobytes()[NAME_AT : NAME_AT + MARK_BYTES].partition(b"\0")[0].decode(errors="replace")
            yield Call(name, "mark", start, start)
            continue
        if signature == WAIT:
            yield Call("wait", "wait", start, end)
            continue
        code, dtype, root = signature & 255, signature >> 8 & 255, (signature >> 32 & 0xFFFFFF) - 1
        is_message = code >= len(COLLECTIVES)
        chunks, path = divmod(chunks, len(PATHS))
        paths = ("cuda",) if queued == ON_GPU else PATHS
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
            if call.kind == "collective" and call.epoch and COLLECTIVES[call.name].synchronizes and not call.failed:
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
