"""`ringcomm draw 1f1b`: a picture of a pipeline schedule, with a row for each rank and time on the x-axis."""

import argparse
from pathlib import Path

from ringcomm.algorithms.draw import COLORS, GRAY, INK, PALE, save, sheet
from ringcomm.errors import refuse
from ringcomm.parallel.schedule import BACKWARD, FORWARD, SCHEDULES, Timeline, make_schedule, simulate

__all__ = ["add_arguments", "draw", "run"]

MAX_UNITS = 400  # of time: a longer picture is not legible
UNITS = {FORWARD: 1, BACKWARD: 2}
SHADES = {FORWARD: COLORS[0], BACKWARD: COLORS[2]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(f"pipeline schedules: {', '.join(SCHEDULES)}").add_argument
    add("-m", "--micro-batches", type=int, metavar="M", help="default: twice the ranks")
    add("-v", "--chunks", type=int, metavar="V", help="stages of each rank (default: 2 if interleaved, else 1)")


def run(arguments: argparse.Namespace) -> int:
    """Draw the schedule of the command line."""
    name, ranks, micro_batches, chunks = (
        getattr(arguments, each) for each in ("algorithm", "ranks", "micro_batches", "chunks")
    )
    if micro_batches is None:
        micro_batches = 2 * ranks
    if chunks is None:
        chunks = 2 if name == "interleaved" else 1
    timeline = simulate(make_schedule(name, ranks, micro_batches, chunks), UNITS[FORWARD], UNITS[BACKWARD])
    if timeline.makespan > MAX_UNITS:
        raise refuse("the picture", f"at most {MAX_UNITS} units of time", timeline.makespan)
    draw(timeline, arguments.output)
    return 0


def draw(timeline: Timeline, output: Path) -> None:
    """Draw a timeline with its makespan, bubble and activations in flight."""
    schedule = timeline.schedule
    # In inches: a unit of time, a row, and the margins for text.
    unit, line, left, above, below = 0.26, 0.5, 0.9, 1.0, 0.6
    wide, high = max(left + unit * timeline.makespan + 0.3, 7.0), above + line * schedule.ranks + below
    figure = sheet(wide, high, f"{schedule.name} pipeline", facts(timeline), legend(timeline))
    size = unit * timeline.makespan / wide, line * schedule.ranks / high
    axes = figure.add_axes((left / wide, below / high, *size))
    axes.set(xlim=(0, timeline.makespan), ylim=(schedule.ranks, 0))
    axes.axis("off")
    for rank, row in enumerate(timeline.spans):
        axes.text(-0.4, rank + 0.5, f"rank {rank}", color=INK, ha="right", va="center_baseline", fontsize=9)
        axes.barh(rank + 0.5, timeline.makespan, height=0.8, color=PALE, zorder=0)
        for action, begin, end in row:
            # The first chunk is darkest.
            style = {"color": SHADES[action.phase], "alpha": 1 - 0.55 * action.chunk / schedule.chunks}
            axes.barh(rank + 0.5, end - begin, left=begin, height=0.8, edgecolor="white", linewidth=0.8, **style)
            text = axes.text((begin + end) / 2, rank + 0.5, f"{action.micro_batch}", color="white", fontsize=8)
            text.set(ha="center", va="center_baseline")
    axes.axvline(timeline.makespan, color=GRAY, linewidth=0.8)
    save(figure, output)


def facts(timeline: Timeline) -> str:
    schedule = timeline.schedule
    chunks = f" of {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    peaks = ", ".join(map(str, timeline.peaks))
    return (
        f"{schedule.ranks} ranks{chunks}, {schedule.micro_batches} micro-batches: {timeline.makespan:g} units of time, "
        f"a bubble of {timeline.bubble:.1%}; in flight on each rank at most {peaks}"
    )


def legend(timeline: Timeline) -> str:
    lighter = "; later chunks are lighter" if timeline.schedule.chunks > 1 else ""
    return (
        f"blue: forward, {UNITS[FORWARD]} unit; green: backward, {UNITS[BACKWARD]} units; gray: idle; "
        f"numbers: micro-batches{lighter}"
    )
