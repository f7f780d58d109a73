"""The text of `ringcomm trace`: who made whom wait, where the time and the bytes went, and what a step waits for."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from ringcomm.trace.entries import Call, Recording

__all__ = ["report"]

BusFactor = Callable[[str, int], float]  # of a call among so many ranks: see nccl-tests


def report(recordings: Sequence[Recording], bus_factor: BusFactor) -> str:
    """Return the report on recordings that entries.read has returned."""
    calls = [call for each in recordings for call in each.calls if call.kind in ("collective", "message")]
    if not calls:
        return "no calls\n"
    seconds = max(call.end for call in calls) - min(call.start for call in calls)
    groups = len({each.group for each in recordings})
    ranks = len({each.process for each in recordings})
    failed = sum(call.failed for call in calls)
    what = [plural(ranks, "rank"), plural(groups, "group"), plural(len(calls), "call")]
    lines = [f"{', '.join(what)} in {seconds:.3g} s" + (f"; {failed:,} failed" if failed else ""), ""]
    for group in dict.fromkeys(each.group for each in recordings):
        lines += [*_group([each for each in recordings if each.group == group], bus_factor), ""]
    lines += _steps(recordings)
    return "\n".join(lines).rstrip() + "\n"


def _group(recordings: Sequence[Recording], bus_factor: BusFactor) -> Iterator[str]:
    size = recordings[0].size
    made_wait: dict[int, float] = defaultdict(float)
    for each in recordings:
        for call in each.calls:
            if call.late is not None:
                made_wait[call.late] += call.waited_for
    yield f"group {recordings[0].group}, {size} ranks"
    yield "  rank     calls   in calls (s)   waiting (s)   others waited for it (s)"
    for each in recordings:
        mine = _timed(each)
        inside, waiting = sum(call.end - call.start for call in mine), sum(call.waited for call in mine)
        yield f"  {each.rank:<6} {len(mine):>7,} {inside:>14.3g} {waiting:>13.3g} {made_wait[each.rank]:>26.3g}"
    yield "  call              calls        bytes   median (us)   waiting   bus (GB/s) while moving"
    kinds: dict[str, list[Call]] = defaultdict(list)
    for each in recordings:
        for call in _timed(each):
            kinds[call.name].append(call)
    for name, calls in sorted(kinds.items(), key=lambda item: -sum(call.end - call.start for call in item[1])):
        time = sum(call.end - call.start for call in calls)
        waited = sum(call.waited for call in calls)
        total = sum(call.bytes for call in calls)
        moved = total * bus_factor(name, size)
        speed = f"{moved / (time - waited) * 1e-9:.3g}" if moved and time > waited else ""
        middle = median(call.end - call.start for call in calls) * 1e6
        yield f"  {name:<16} {len(calls):>6,} {total:>12,} {middle:>13.4g} {waited / time:>9.0%} {speed:>25}"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _timed(recording: Recording) -> list[Call]:
    return [call for call in recording.calls if call.kind in ("collective", "message")]


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
        exposed = sum(covered for _, covered in found) / sum(length for length, _ in found)
        yield f"  {name:<16} {len(found):>7,} {median(length for length, _ in found) * 1e3:>13.4g} {exposed:>23.1%}"


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
