"""A picture of a trace: a row for each rank, with the time in calls, and in it the time spent waiting for others."""

from collections.abc import Sequence
from pathlib import Path

from ringcomm.trace.chrome import ranks_of
from ringcomm.trace.entries import Recording

__all__ = ["plot"]

MOVING, WAITING, STEP = "tab:blue", "tab:red", "0.3"


def plot(recordings: Sequence[Recording], picture: Path) -> None:
    """Draw the timeline. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = ranks_of(recordings)
    figure = Figure(figsize=(11, 1.2 + 0.45 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    for each in recordings:
        row = ranks[each.host, each.pid]
        calls = [call for call in each.calls if call.kind in ("collective", "message")]
        moving = [(call.start + call.waited, call.end - call.start - call.waited) for call in calls]
        waiting = [(call.start, call.waited) for call in calls]
        axes.broken_barh(moving, (row - 0.4, 0.8), color=MOVING)
        axes.broken_barh(waiting, (row - 0.4, 0.8), color=WAITING)
        axes.vlines([c.start for c in each.calls if c.kind == "mark"], row - 0.5, row + 0.5, STEP, linewidth=0.8)
    axes.set(xlabel="seconds", ylabel="rank", yticks=sorted({*ranks.values()}))
    axes.invert_yaxis()
    legend = [Patch(color=WAITING, label="waits for others"), Patch(color=MOVING, label="moves data")]
    axes.legend(
        handles=legend, loc="upper center", bbox_to_anchor=(0.5, 1.0 + 0.5 / len(ranks)), ncols=2, frameon=False
    )
    figure.savefig(picture, dpi=150)
