"""The text of `ringcomm trace`: who made whom wait, where the time and the bytes went, and what a step waits for."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.trace.entries import Call, Recording

__all__ = ["plural", "printable", "report"]

BusFactor = Callable[[str, int], float]  # of a call among so many ranks: see nccl-tests


def report(recordings: Sequence[Recording], bus_factor: BusFactor) -> str:
    """Return the report on recordings that entries.read has returned."""
    calls = [call for each in recordings for call in each.calls if call.kind in ("collective", "message")]
    if not calls:
        return "no calls\n"
    seconds = max(call.end for call in calls) - min(call.start for call in calls)
    groups = len({each.group for each in recordings})
    processes: dict[int, dict[str, int]] = defaultdict(dict)  # of each rank of the job
    for each in recordings:
        processes[each.job_rank][each.process] = each.pid
    failed, dropped = sum(call.failed for call in calls), sum(each.dropped for each in recordings)
    what = [plural(len(processes), "rank"), plural(groups, "group"), plural(len(calls), "call")]
    notes = [f"{failed:,} failed"] * (failed > 0) + [f"there was no room for {dropped:,} more"] * (dropped > 0)
    lines = ["; ".join([f"{', '.join(what)} in {seconds:.3g} s", *notes])]
    for rank, started in sorted(processes.items()):
        if len(started) > 1:
            lines.append(f"rank {rank} was restarted: process {', then '.join(map(str, started.values()))}")
    lines.append("")
    for group in dict.fromkeys(each.group for each in recordings):
        lines += [*_group([each for each in recordings if each.group == group], bus_factor), ""]
    lines += _steps(recordings)
    return "\n".join(lines).rstrip() + "\n"


def _group(recordings: Sequence[Recording], bus_factor: BusFactor) -> Iterator[str]:
    size = recordings[0].size
    made_wait = _made_wait(recordings)
    one_host = len({each.host for each in recordings}) == 1
    memcpy = median(each.memcpy for each in recordings) if one_host else None
    copied = f"; memcpy {memcpy:.3g} GB/s" if memcpy else ""
    yield f"group {recordings[0].group}, {plural(size, 'rank')}{_ranks_of_job(recordings)}{copied}"
    if missing := {*range(size)} - {each.rank for each in recordings}:
        yield f"  no trace of {format_ranks(missing)} (of {size})"
    yield "  rank     calls   in calls (s)   waiting (s)   others waited for it (s)"
    for each in recordings:
        mine = _timed(each)
        inside, waiting = sum(call.end - call.start for call in mine), sum(call.waited for call in mine)
        yield f"  {each.rank:<6} {len(mine):>7,} {inside:>14.3g} {waiting:>13.3g} {made_wait[each.rank]:>26.3g}"
    share = "   of memcpy" if memcpy else ""
    yield f"  call                 calls        bytes   median (us)   waiting   bus (GB/s) while moving{share}"
    kinds: dict[tuple[str, bool], list[Call]] = defaultdict(list)
    for each in recordings:
        for call in _timed(each):
            kinds[call.name, call.path == "cuda"].append(call)
    for (name, on_gpus), calls in sorted(
        kinds.items(), key=lambda item: -sum(call.end - call.start for call in item[1])
    ):
        time = sum(call.end - call.start for call in calls)
        waited = sum(call.waited for call in calls)
        total = sum(call.bytes for call in calls)
        moved = total * bus_factor(name, size)
        bandwidth = moved / (time - waited) * 1e-9 if time > waited else 0.0
        speed = (
            f"{bandwidth:>25.3g}" + (f"{bandwidth / memcpy:>12.0%}" if memcpy and not on_gpus else "")
            if bandwidth
            else ""
        )
        middle = median(call.end - call.start for call in calls) * 1e6
        kind = name + ", GPU" * on_gpus
        waiting = waited / time if time else 0.0
        yield f"  {kind:<19} {len(calls):>6,} {total:>12,} {middle:>13.4g} {waiting:>9.0%} {speed}".rstrip()


def _ranks_of_job(recordings: Sequence[Recording]) -> str:
    """Return which ranks of the job are in a group, in the order of their ranks there, unless they are all of it."""
    ranks = {each.rank: each.job_rank for each in recordings}
    size, job_size = recordings[0].size, max(each.job_size for each in recordings)
    if size == job_size and all(rank == of_job for rank, of_job in ranks.items()):
        return ""
    runs: list[list[int | None]] = []
    for rank in (ranks.get(each) for each in range(size)):  # None: there is no trace of it
        if runs and rank is not None and rank - 1 == runs[-1][-1]:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = []
    for run in runs:
        names = ["?" if rank is None else str(rank) for rank in run]
        words += [f"{names[0]} to {names[-1]}"] if len(names) > 2 else names
    *first, last = words
    return f" ({', '.join(first)}{' and ' * bool(first)}{last} of the job)"


def _made_wait(recordings: Sequence[Recording]) -> dict[int, float]:
    """Return how long others have waited for each rank.

    Where that rank itself spent most of this time waiting in the same call, it counts for the one it waited for: the
    ranks of a host wait for the one that hears from other hosts.
    """
    waits = {  # of each rank in each call: for whom, and how long
        (each.rank, call.epoch): (call.late, call.waited_for)
        for each in recordings
        for call in each.calls
        if call.late is not None and not call.failed
    }
    made_wait: dict[int, float] = defaultdict(float)
    for (rank, epoch), (culprit, seconds) in waits.items():
        seen = {rank}
        while culprit not in seen:
            seen.add(culprit)
            cause, most = waits.get((culprit, epoch), (culprit, 0.0))
            if most > seconds / 2 and cause not in seen:
                culprit = cause
        made_wait[culprit] += seconds
    return made_wait


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _timed(recording: Recording) -> list[Call]:
    """Return the calls whose times count: a failed one does not know for how long, or for which rank, it has waited."""
    return [call for call in recording.calls if call.kind in ("collective", "message") and not call.failed]


def _steps(recordings: Sequence[Recording]) -> Iterator[str]:
    """Yield, for each name of marks, what the time between two of them has of waiting for communication."""
    processes: dict[str, list[Call]] = defaultdict(list)
    for each in recordings:
        processes[each.process] += each.calls
    steps: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for calls in processes.values():
        inside = _Cover((call.start, call.end) for call in calls if call.kind != "mark" and not call.queued)
        for name in {call.name for call in calls if call.kind == "mark"}:
            marks = sorted(call.start for call in calls if call.kind == "mark" and call.name == name)
            if len(marks) > 1:
                steps[name] += [(end - begin, inside.within(begin, end)) for begin, end in pairwise(marks)]
    if steps:
        yield "  mark               steps   median (ms)   exposed communication"
    for name, found in steps.items():
        exposed = sum(covered for _, covered in found) / (sum(length for length, _ in found) or 1.0)
        length = median(length for length, _ in found) * 1e3
        yield f"  {printable(name):<16} {len(found):>7,} {length:>13.4g} {exposed:>23.1%}"


def printable(name: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


class _Cover:
    """The times that are in any of some intervals."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self._begins: list[float] = []  # of disjoint intervals
        self._ends: list[float] = []
        self._before: list[float] = []  # the length of the earlier ones
        total, at = 0.0, float("-inf")
        for begin, end in sorted(intervals):
            if end > at:
                begin = max(begin, at)
                self._begins.append(begin)
                self._ends.append(end)
                self._before.append(total)
                total, at = total + end - begin, end

    def within(self, begin: float, end: float) -> float:
        """Return their length between two times."""
        return self._until(end) - self._until(begin)

    def _until(self, time: float) -> float:
        last = bisect_right(self._begins, time) - 1
        return self._before[last] + min(time, self._ends[last]) - self._begins[last] if last >= 0 else 0.0
