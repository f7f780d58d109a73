"""`ringcomm draw 1f1b`: a picture of a pipeline schedule, with a row for each rank and time on the x-axis."""

import argparse
from pathlib import Path

from ringcomm.algorithms.draw import GRAY, INK, PALE, save, sheet
from ringcomm.errors import refuse
from ringcomm.pipelining.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, SCHEDULES, make_schedule
from ringcomm.pipelining.simulation import Timeline, simulate

__all__ = ["add_arguments", "draw", "run"]

MAX_UNITS = 400  # of time: a longer picture is not legible
UNITS = {FORWARD: 1, BACKWARD: 2, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1}
COLORS = {FORWARD: "blue", BACKWARD: "green", BACKWARD_INPUT: "green", BACKWARD_WEIGHT: "olive"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(f"pipeline schedules: {', '.join(SCHEDULES)}").add_argument
    add("-m", "--micro-batches", type=int, metavar="M", help="default: twice the ranks")
    add("-v", "--chunks", type=int, metavar="V", help="stages of each rank (default: 2 if interleaved or zbv, else 1)")


def run(arguments: argparse.Namespace) -> int:
    """Draw the schedule of the command line."""
    name, ranks = arguments.algorithm, arguments.ranks
    micro_batches = 2 * ranks if arguments.micro_batches is None else arguments.micro_batches
    timeline = simulate(make_schedule(name, ranks, micro_batches, arguments.chunks), UNITS[FORWARD], UNITS[BACKWARD])
    if timeline.makespan > MAX_UNITS:
        raise refuse("the picture", f"at most {MAX_UNITS} units of time", timeline.makespan)
    draw(timeline, arguments.output)
    return 0


def draw(timeline: Timeline, output: Path) -> None:
    """Draw a timeline with its makespan, bubble and activations in flight."""
    schedule = timeline.schedule
    words = f"{schedule.name} pipeline", facts(timeline), legend(timeline)
    figure, axes = sheet(0.26 * timeline.makespan, 0.5 * schedule.ranks, *words)
    axes.set(xlim=(0, timeline.makespan), ylim=(schedule.ranks, 0))
    for rank, row in enumerate(timeline.spans):
        axes.text(-0.4, rank + 0.5, f"rank {rank}", color=INK, ha="right", va="center_baseline", fontsize=9)
        axes.barh(rank + 0.5, timeline.makespan, height=0.8, color=PALE, zorder=0)
        for action, begin, end in row:
            # The first chunk is darkest.
            style = {"color": f"tab:{COLORS[action.phase]}", "alpha": 1 - 0.55 * action.chunk / schedule.chunks}
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
    found = {action.phase for row in timeline.schedule.table for action in row}
    phases = [f"{color}: {phase}, {units(UNITS[phase])}" for phase, color in COLORS.items() if phase in found]
    lighter = ["later chunks are lighter"] if timeline.schedule.chunks > 1 else []
    return "; ".join([*phases, "gray: idle", "numbers: micro-batches", *lighter])


def units(count: int) -> str:
    return f"{count} unit{'s' * (count > 1)}"
