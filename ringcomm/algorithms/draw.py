"""`ringcomm draw`: the schedule of an algorithm as a picture, ranks side by side and time going down."""

import argparse
from itertools import accumulate, groupby, pairwise
from math import log2
from pathlib import Path
from typing import Any

from ringcomm.algorithms.block_transfers import BlockTransfer, block_transfers, runs
from ringcomm.algorithms.schedule import ALGORITHMS, Algorithm
from ringcomm.errors import ArgumentError
from ringcomm.options import picture
from ringcomm.types import COLLECTIVES

__all__ = ["GRAY", "INK", "PALE", "add_arguments", "label", "offsets", "run", "save", "sheet"]

MAX_RANKS = 32  # more would be unreadable
INK, SLATE, GRAY, PALE, BAND = "black", "dimgray", "gray", "lightgray", "whitesmoke"
COLORS = [f"C{number}" for number in range(10)]  # of blocks, in matplotlib's order
LABEL_AT = 0.27  # label position, as a fraction of the distance to the next rank: before arrows cross


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("algorithm", metavar="NAME", help=", ".join(names()))
    add("-n", "-p", "--ranks", type=int, default=5, metavar="N", help=f"2 to {MAX_RANKS} (default: 5)")
    add("--collective", metavar="NAME", help="default: all_reduce, else the first collective of the algorithm")
    add("-o", "--output", type=picture, required=True, metavar="PICTURE", help=".png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> int:
    """Draw the schedule that the command line selects."""
    name, collective, size = arguments.algorithm, arguments.collective, arguments.ranks
    served = [each for each in ALGORITHMS if name in ALGORITHMS[each]]
    if collective is None:
        collective = "all_reduce" if "all_reduce" in served else served[0]
    if collective not in served:
        raise ArgumentError(f"there is no {name} {collective}; {name} implements: {', '.join(served)}")
    if not 2 <= size <= MAX_RANKS:
        raise ArgumentError(f"-n: expected 2 to {MAX_RANKS} ranks, got {size}")
    draw(ALGORITHMS[collective][name], size, arguments.output)
    return 0


def names() -> list[str]:
    return sorted({name for found in ALGORITHMS.values() for name in found})


def draw(algorithm: Algorithm, size: int, output: Path) -> None:
    found = block_transfers(algorithm, size)
    rows = [list(group) for _, group in groupby(found, key=lambda arrow: arrow.wave)]
    tops = [*accumulate((height(offsets(row, size)) for row in rows), initial=0.0)]
    blocks = 1 + max((block for arrow in found for block in arrow.blocks), default=-1)

    words = algorithm.title, facts(algorithm, size, len(rows)), legend(algorithm, found, blocks)
    figure, axes = sheet(size + 0.2, 0.6 * tops[-1], *words)
    axes.set(xlim=(-0.6, size - 0.4), ylim=(tops[-1], 0))
    for rank in range(size):
        axes.plot(rank, -0.38, "o", markersize=20, color=INK, clip_on=False)
        axes.text(rank, -0.385, f"{rank}", color="white", ha="center", va="center_baseline", fontsize=10, weight="bold")
        axes.plot([rank, rank], [0, tops[-1]], color=PALE, linewidth=1.5, zorder=1)
    for number, (group, (top, bottom)) in enumerate(zip(rows, pairwise(tops), strict=True), 1):
        axes.axhspan(top, bottom, color=BAND if number % 2 else "white", linewidth=0, zorder=0)
        axes.text(-0.75, (top + bottom) / 2, f"{number}", color=GRAY, ha="right", va="center", fontsize=9)
        draw_row(axes, group, top + 0.16, bottom - 0.16, size, blocks)
    save(figure, output)


def sheet(wide: float, high: float, title: str, facts: str, legend: str) -> tuple[Any, Any]:
    """Return a figure and its axes, of this size in inches, with two lines of text above and one below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(wide, high))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    for text, top, points, style in (
        (title, 1, 60, {"color": INK, "fontsize": 15, "weight": "bold"}),
        (facts, 1, 40, {"color": GRAY}),
        (legend, 0, -20, {"color": GRAY, "fontsize": 9}),
    ):
        axes.annotate(text, (0, top), (-40, points), xycoords="axes fraction", textcoords="offset points", **style)
    return figure, axes


def save(figure: Any, output: Path) -> None:
    figure.savefig(output, dpi=150, bbox_inches="tight", pad_inches=0.2)


def draw_row(axes: Any, row: list[BlockTransfer], begin: float, end: float, size: int, blocks: int) -> None:
    for arrow, offset in zip(row, offsets(row, size), strict=True):
        color = COLORS[arrow.blocks[0] % len(COLORS)] if len(arrow.blocks) == 1 < blocks else SLATE
        style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.5, "mutation_scale": 11, "shrinkA": 0}
        style["shrinkB"] = 6 if arrow.reduced else 1
        # An arrow that leaves at one edge enters at the other.
        for start in {arrow.sender, arrow.receiver - offset}:
            line = axes.annotate(
                "", (start + offset, end), (start, begin), arrowprops=style, annotation_clip=False, zorder=2
            )
            line.arrow_patch.set_clip_path(axes.patch)
        axes.plot(arrow.sender, begin, "o", markersize=3.5, color=color, zorder=3)
        if arrow.reduced:
            axes.plot(arrow.receiver, end, "o", markersize=10, color="white", markeredgecolor=color, zorder=3)
            axes.plot(arrow.receiver, end, "+", markersize=6, color=color, zorder=4)
        if arrow.blocks:
            near = LABEL_AT / abs(offset)
            place = arrow.sender + offset * near, begin + (end - begin) * near
            text = axes.text(*place, label(arrow.blocks, blocks), color="white", ha="center", va="center", zorder=5)
            box = {"boxstyle": "round,pad=0.22", "facecolor": color, "edgecolor": "white", "linewidth": 0.8}
            text.set(fontsize=8, bbox=box)


def offsets(row: list[BlockTransfer], size: int) -> list[int]:
    """Return how far each arrow goes to the right.

    Where every rank sends as far around, the ranks are a circle that is cut open: it goes the shorter way.
    """
    straight = [arrow.receiver - arrow.sender for arrow in row]
    around = {offset % size for offset in straight}
    if len(around) > 1 or len(row) < size or 2 * max(around) == size:
        return straight
    return [offset if 2 * offset < size else offset - size for offset in around] * size


def height(offsets: list[int]) -> float:
    """Return the height of a row: more if long arrows cross."""
    return 1 + 0.4 * min(2, log2(max(map(abs, offsets))))


def facts(algorithm: Algorithm, size: int, steps: int) -> str:
    share = algorithm.sent(size, 1)  # of an array
    sent = f"; a rank sends at most {share:.3g} × the array" if share else ""
    return f"{size} ranks, {steps} steps{sent}"


def legend(algorithm: Algorithm, found: list[BlockTransfer], blocks: int) -> str:
    labels = {label(arrow.blocks, blocks) for arrow in found}
    whose = "the ranks that blocks are for" if COLLECTIVES[algorithm.collective].exchanges else "blocks of the array"
    words = [f"numbers: {whose}"] * any(text[:1].isdigit() for text in labels)
    words += ["×: number of blocks"] * any(text.startswith("×") for text in labels)
    words += ["\N{CIRCLED PLUS} reduced into the receiver's data"] * any(arrow.reduced for arrow in found)
    return "      ".join(words)


def label(moved: tuple[int, ...], blocks: int) -> str:
    """Return 3, 3–5, 1,3 or all; ×4 if the list of the four would be too long."""
    if len(moved) == blocks:
        return "all"
    words = ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs(moved))
    return words if len(words) <= 5 else f"×{len(moved)}"
