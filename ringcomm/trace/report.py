"""The text of `ringcomm trace`: who made whom wait, where the time and the bytes went, and what a step waits for."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from ringcomm.trace.entries import Call, Recording
from ringcomm.types import COLLECTIVES

__all__ = ["report"]

BusFactor = Callable[[str, int], float]  # of a call among so many ranks: see nccl-tests


def report(recordings: Sequence[Recording], bus_factor: BusFactor) -> str:
    """Return the report on recordings that entries.read has returned."""
    calls = [call for each in recordings for call in each.calls if call.kind in ("collective", "message")]
    if not calls:
        return "no calls\n"
    seconds = max(call.end for call in calls) - min(call.start for call in calls)
    groups = len({each.group for each in recordings})
    ranks = len({(each.host, each.pid) for each in recordings})
    lines = [f"{ranks} ranks, {groups} groups, {len(calls):,} calls in {seconds:.3g} s", ""]
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
        total = sum(call.bytes for call in calls) * (size if _is_of_blocks(name) else 1)
        moved = total * bus_factor(name, size)
        speed = f"{moved / (time - waited) * 1e-9:.3g}" if moved and time > waited else ""
        middle = median(call.end - call.start for call in calls) * 1e6
        yield f"  {name:<16} {len(calls):>6,} {total:>12,} {middle:>13.4g} {waited / time:>9.0%} {speed:>25}"


def _is_of_blocks(name: str) -> bool:
    """Return whether the bytes of a call are those of one rank's block."""
    row = COLLECTIVES.get(name)
    return row is not None and "BLOCK" in row.given + row.got


def _timed(recording: Recording) -> list[Call]:
    return [call for call in recording.calls if call.kind in ("collective", "message")]


def _steps(recordings: Sequence[Recording]) -> Iterator[str]:
    """Yield, for each name of marks, what the time between two of them has of waiting for communication."""
    processes: dict[tuple[str, int], list[Call]] = defaultdict(list)
    for each in recordings:
        processes[each.host, each.pid] += each.calls
    steps: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for calls in processes.values():
        inside = sorted((c.start, c.end) for c in calls if c.kind != "mark" and not c.queued)
        for name in {call.name for call in calls if call.kind == "mark"}:
            marks = sorted(call.start for call in calls if call.kind == "mark" and call.name == name)
            for begin, end in zip(marks, marks[1:], strict=False):
                steps[name].append((end - begin, _covered(inside, begin, end)))
    if steps:
        yield "  mark               steps   median (ms)   exposed communication"
    for name, found in steps.items():
        exposed = sum(covered for _, covered in found) / sum(length for length, _ in found)
        yield f"  {name:<16} {len(found):>7,} {median(length for length, _ in found) * 1e3:>13.4g} {exposed:>23.1%}"


def _covered(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the length of the part of a time that sorted intervals cover."""
    total, at = 0.0, begin
    for first, last in intervals:
        first, last = max(first, at), min(last, end)
        if last > first:
            total += last - first
            at = last
    return total
