"""What the ranks of this user's jobs do at this moment, read from their shared memory. Nothing is asked of them.

A job is a file of shared memory, and an arena in it a group: each process that has it mapped shows where. The kernel
lets only the same user open it.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ringcomm.native import check, ffi, lib

__all__ = ["Rank", "RunningJob", "find_jobs"]

MOST_RANKS = 1024
MEMORY = "/memfd:ringcomm"
RUNNING = re.compile(r" ?(.+), running for ([\d.]+) s(?:, waits for rank (\d+))?$")


@dataclass(slots=True)
class Rank:
    """What a rank does.

    Attributes:
        call: the call that it is in, of any of its groups, since so many `seconds`; None: in none
        waits_for: the rank of the job for which it waits in the call
        state: "runs", "stopped", "gone" or "closed"
        calls, bytes: since the start, of all groups
    """

    rank: int
    pid: int
    state: str
    call: str | None = None
    seconds: float = 0.0
    waits_for: int | None = None
    calls: int = 0
    bytes: int = 0


@dataclass(slots=True)
class RunningJob:
    """A job, or several that one process has joined one after another, by its number."""

    number: int
    command: str
    ranks: list[Rank]


def find_jobs() -> list[RunningJob]:
    """Return the jobs of this user on this machine, by number."""
    processes: dict[int, list[int]] = defaultdict(list)  # by inode of the shared memory
    arenas: dict[int, set[int]] = defaultdict(set)  # offsets
    for pid, inode, offset in _mappings():
        if pid not in processes[inode]:
            processes[inode].append(pid)
        arenas[inode].add(offset)
    jobs = []
    for inode, pids in sorted(processes.items()):
        with suppress(OSError):  # they have ended meanwhile
            fd = _open(pids, inode)
            try:
                ranks = _ranks(fd, arenas[inode], pids)
            finally:
                os.close(fd)
            if any(rank.state in ("runs", "stopped") for rank in ranks):
                jobs.append(RunningJob(inode, _command(pids[0]), ranks))
    return jobs


def _mappings() -> Iterator[tuple[int, int, int]]:
    """Yield process, inode and offset of each mapping of shared memory of ringcomm that this user has."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            if folder.stat().st_uid != os.getuid():
                continue
            for line in (folder / "maps").read_text().splitlines():
                if MEMORY in line:
                    _, _, offset, _, inode, *_ = line.split()
                    yield int(folder.name), int(inode), int(offset, 16)


def _open(pids: list[int], inode: int) -> int:
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(link).startswith(MEMORY) and link.stat().st_ino == inode:
                        return os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    raise FileNotFoundError


def _ranks(fd: int, offsets: set[int], pids: list[int]) -> list[Rank]:
    """Return the ranks of the world, with the calls that they are in, of whatever group."""
    views, size = ffi.new("rc_rank_view[]", MOST_RANKS), ffi.new("int *")
    ranks: dict[int, Rank] = {}
    members_open = set()
    for offset in sorted(offsets):  # the world comes first
        check(lib.rc_inspect(fd, offset, MOST_RANKS, views, size))
        members = [views[i].member for i in range(size[0])]
        for view in views[0 : size[0]]:
            if not view.pid:
                continue
            rank = ranks.setdefault(view.member, Rank(view.member, view.pid, _state(view.pid, pids)))
            rank.calls, rank.bytes = rank.calls + view.calls, rank.bytes + view.bytes
            if not view.closed:
                members_open.add(rank.rank)
            running = RUNNING.match(str(ffi.string(view.running), errors="replace").rpartition(";")[2])
            if running and rank.state in ("runs", "stopped"):
                group = f" in a group of {size[0]}" if size[0] < len(ranks) else ""
                rank.call, rank.seconds = running[1] + group, float(running[2])
                rank.waits_for = members[int(running[3])] if running[3] else None
    for rank in ranks.values():
        if rank.rank not in members_open:
            rank.state = "closed"
    return [ranks[rank] for rank in sorted(ranks)]


def _state(pid: int, pids: list[int]) -> str:
    if pid not in pids:
        return "gone"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "runs")


def _command(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return " ".join(word.decode(errors="replace") for word in words if word)
    return ""
