"""A picture of a trace: a row for each process, with the time in calls, and in it the time spent waiting for others."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ringcomm.trace.entries import Recording, processes_of

__all__ = ["plot"]

MOVING, WAITING, MARK = "tab:blue", "tab:red", "0.3"


def plot(recordings: Sequence[Recording], picture: Path) -> None:
    """Draw the timeline."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    processes = processes_of(recordings)
    rows = {process: row for row, process in enumerate(processes)}
    times = Counter(each.job_rank for each in processes.values())  # that a rank was started
    labels = [
        f"{each.job_rank}, process {each.pid}" if times[each.job_rank] > 1 else each.job_rank
        for each in processes.values()
    ]
    figure = Figure(figsize=(11, 1.4 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for each in recordings:
        row = rows[each.process]
        calls = [call for call in each.calls if call.kind in ("collective", "message")]
        waiting = [(call.start, call.waited) for call in calls]
        moving = [(call.start + call.waited, call.end - call.start - call.waited) for call in calls]
        # An edge would widen each bar, so that a short one would hide what is beside it.
        axes.broken_barh(waiting, (row - 0.4, 0.8), color=WAITING, linewidth=0)
        axes.broken_barh(moving, (row - 0.4, 0.8), color=MOVING, linewidth=0)
        axes.vlines([c.start for c in each.calls if c.kind == "mark"], row - 0.5, row + 0.5, MARK, linewidth=0.8)
    axes.set(xlabel="seconds", ylabel="rank", yticks=[*rows.values()], yticklabels=labels)
    axes.invert_yaxis()
    bars = [Patch(color=WAITING, label="waits for others"), Patch(color=MOVING, label="moves data")]
    mark = Line2D([], [], color=MARK, linewidth=0.8, label="mark")
    figure.legend(handles=[*bars, mark], loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(picture, dpi=150)
