"""`ringcomm plot`: plot time and bus bandwidth over the size, from the results of `ringcomm bench --json`."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ringcomm import ArgumentError
from ringcomm.options import picture, readable

__all__ = ["add_arguments", "run"]

Row = dict[str, Any]

# Fixed colors: a library looks the same in every picture.
COLORS = {"ringcomm": "C3", "openmpi": "C0", "mpi": "C0", "mpich": "C2", "gloo": "C1", "nccl": "C4"}
TICKS = [4**i for i in range(1, 20)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results of `ringcomm bench --json`")
    parser.add_argument("-o", "--output", type=picture, required=True, metavar="PICTURE", help=".png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> int:
    """Draw two plots side by side for each collective and number of ranks in the files."""
    documents = [read(path) for path in arguments.files]
    rows = [row for document in documents for row in document["rows"] if row["bytes"]]
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["collective"], row["ranks"]), []).append(row)
    if not groups:
        raise ArgumentError("nothing to plot: these files have no rows with a size")
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots(len(groups), 2, figsize=(13, 4.6 * len(groups)), squeeze=False, layout="constrained")
    for ((collective, ranks), group), (time, busbw) in zip(groups.items(), axes, strict=True):
        draw(time, group, lambda row, seconds: seconds * 1e6)
        draw(busbw, group, lambda row, seconds: row["busbw"] * row["median"] / seconds / 1e9)
        copies = {row["bytes"]: row["memcpy"] for row in group if row["memcpy"]}
        sizes = sorted(copies)
        style = {"color": "0.5", "linestyle": ":", "label": "memcpy of 256 MiB on every core"}
        time.plot(sizes, [size / copies[size] * 1e6 for size in sizes], **style)
        busbw.plot(sizes, [copies[size] / 1e9 for size in sizes], **style)
        time.set(title=f"{collective}, {ranks} ranks: time", ylabel="µs")
        busbw.set(title=f"{collective}, {ranks} ranks: bus bandwidth", ylabel="GB/s")
        for axis in (time, busbw):
            axis.set(xscale="log", yscale="log", xlabel="bytes")
            drawn = [row["bytes"] for row in group]
            shown = [size for size in TICKS if min(drawn) <= size <= max(drawn)]
            axis.set_xticks(shown, [readable(size) for size in shown], rotation=45)
            axis.xaxis.minorticks_off()
            axis.grid(alpha=0.3)
        time.legend(fontsize="small")
        time.set_ylim(bottom=min(row["median"] for row in group) * 5e5)  # below: memcpy of a few bytes
    machine = documents[0]["machine"]
    title = f"{machine['cpu']}, {machine['cores']} cores; {machine['date'][:10]}"
    figure.suptitle(f"{title}; solid, with p10 to p90: rotated buffers; dashed: cached", fontsize="medium")
    figure.savefig(arguments.output, dpi=100)
    pyplot.close(figure)
    return 0


def draw(axis: Any, rows: Iterable[Row], value: Any) -> None:
    """Draw a line per library and kind of buffers; `value(row, seconds)` converts a time."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        name = row["library"] + ", symmetric" * row["symmetric"] + ", async" * row["asynchronous"]
        name += ", shared arrays" * row.get("shared_arrays", False)
        lines.setdefault((name, row["buffers"]), []).append(row)
    labeled = set()
    for (name, buffers), line in lines.items():
        line = sorted(line, key=lambda row: int(row["bytes"]))
        sizes = [row["bytes"] for row in line]
        library, _, variant = name.partition(",")[0].partition("/")
        style = {"color": COLORS.get(library), "alpha": 0.5 if variant else 1.0}
        style["linestyle"] = "--" if buffers == "cached" else "-"
        style["marker"] = "s" if "symmetric" in name or "shared" in name else "."
        axis.plot(
            sizes, [value(row, row["median"]) for row in line], label=name if name not in labeled else None, **style
        )
        labeled.add(name)
        if buffers == "rotated":
            low, high = ([value(row, row[p]) for row in line] for p in ("p10", "p90"))
            axis.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)


def read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        if document["machine"] and all("busbw" in row for row in document["rows"]):
            return document
    except (ValueError, KeyError, TypeError):
        pass
    raise ArgumentError(f"{path}: expected results of `ringcomm bench --json`")
