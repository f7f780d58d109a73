"""What the ranks of this user's jobs do at this moment, read from their shared memory. Nothing is asked of them.

A job is a file of shared memory, and an arena in it a group: each process that has it mapped shows where. The kernel
lets only the same user open it.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ringcomm.bootstrap.place import LAUNCHERS, environment_of
from ringcomm.native import check, ffi, lib

__all__ = ["Rank", "RunningJob", "find_jobs"]

MOST_RANKS = 1024
MEMORY = "/memfd:ringcomm"


@dataclass(slots=True)
class Rank:
    """What a rank does.

    Attributes:
        rank: in the job, if its launcher has told the process; else among the ranks that share memory
        call: the call that it is in, of any of its groups, since so many `seconds`; None: in none
        waits_for: the rank of the job for which it waits in the call, as far as it knows
        state: "runs", "stopped", "lost" or "closed"
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
class _Linked:
    """A rank that a link connects with other hosts, as one of `processes`; for which of them it waits."""

    rank: Rank
    process: int
    processes: int
    waits_for: int | None = None


@dataclass(slots=True)
class RunningJob:
    """A job, or several that one process has joined one after another, by its number.

    Attributes:
        size: the number of ranks of the job, on all hosts
    """

    number: int
    command: str
    size: int
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
                ranks, linked = _ranks(fd, arenas[inode], pids)
            finally:
                os.close(fd)
            if any(rank.state in ("runs", "stopped") for rank in ranks):
                size = _number_in_job(ranks)
                _name_awaited(linked, size)
                jobs.append(RunningJob(inode, _command(pids[0]), size, ranks))
    return jobs


def _mappings() -> Iterator[tuple[int, int, int]]:
    """Yield process, inode and offset of each mapping of shared memory of ringcomm that this user has."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            if folder.stat().st_uid != os.getuid():
                continue
            for line in (folder / "maps").read_text(errors="replace").splitlines():
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


def _ranks(fd: int, offsets: set[int], pids: list[int]) -> tuple[list[Rank], list[_Linked]]:
    """Return the ranks of the world, with the calls that they are in, of whatever group."""
    views, size = ffi.new("rc_rank_view[]", MOST_RANKS), ffi.new("int *")
    ranks: dict[int, Rank] = {}
    linked: dict[int, _Linked] = {}
    members_open = set()
    for offset in sorted(offsets):  # the world comes first
        check(lib.rc_inspect(fd, offset, MOST_RANKS, views, size))
        for view in views[0 : size[0]]:
            if not view.pid:
                continue
            rank = ranks.setdefault(view.member, Rank(view.member, view.pid, _state(view.pid, pids)))
            rank.calls, rank.bytes = rank.calls + view.calls, rank.bytes + view.bytes
            if not view.closed:
                members_open.add(rank.rank)
            link = (
                linked.setdefault(view.member, _Linked(rank, view.process, view.processes)) if view.processes else None
            )
            call = str(ffi.string(view.call), errors="replace")
            waits = view.waits_for >= 0 or view.waits_for_process >= 0
            # Of calls in several groups one that waits for a known rank holds this one up.
            if not call or rank.state not in ("runs", "stopped") or (rank.call and not waits):
                continue
            known = linked[view.member].processes if view.member in linked else len(ranks)
            rank.call = f"{call} in a group of {view.of_ranks}" if view.of_ranks < known else call
            rank.seconds = view.seconds
            rank.waits_for = view.waits_for if view.waits_for >= 0 else None
            if link:
                link.waits_for = view.waits_for_process if view.waits_for_process >= 0 else None
    for rank in ranks.values():
        if rank.rank not in members_open:
            rank.state = "closed"
    return [ranks[rank] for rank in sorted(ranks)], [*linked.values()]


def _number_in_job(ranks: list[Rank]) -> int:
    """Give ranks their numbers in the job, and return its size.

    The environment of a lost rank cannot be read: it gets a number if those of the others begin anywhere, but
    follow each other. Where that fails, or the ranks are threads, they keep their numbers.
    """
    places = {each.rank: place for each in ranks if each.state != "lost" and (place := _place(each.pid))}
    offsets = {rank - own for own, (rank, _) in places.items()}
    numbers = {each.rank: each.rank + min(offsets, default=0) for each in ranks} if len(offsets) == 1 else {}
    numbers |= {own: rank for own, (rank, _) in places.items()}
    sizes = {size for _, size in places.values()}
    if len({*numbers.values()}) < len(ranks) or len(sizes) != 1:
        return len(ranks)
    for each in ranks:
        each.rank = numbers[each.rank]
        each.waits_for = None if each.waits_for is None else numbers[each.waits_for]
    ranks.sort(key=lambda each: each.rank)
    return sizes.pop()


def _name_awaited(linked: list[_Linked], size: int) -> None:
    """Name the ranks for which some wait on the link, which may connect only a part of the job, after `shrink`."""
    here = {each.process: each.rank.rank for each in linked}
    for each in linked:
        if each.rank.waits_for is None and each.waits_for is not None:
            each.rank.waits_for = each.waits_for if each.processes == size else here.get(each.waits_for)


def _place(pid: int) -> tuple[int, int] | None:
    """Return the rank and the size of the job that a launcher gave a process, None if there was none."""
    with suppress(OSError, ValueError):
        environment = environment_of(pid)
        for launcher in LAUNCHERS:
            if launcher.mark in environment and not launcher.missing(environment):
                return int(environment[launcher.rank]), int(environment[launcher.size])
    return None


def _state(pid: int, pids: list[int]) -> str:
    if pid not in pids:
        return "lost"
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "lost"
    return {"T": "stopped", "t": "stopped", "Z": "lost", "X": "lost"}.get(state, "runs")


def _command(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return " ".join(word.decode(errors="replace") for word in words if word)
    return ""
