"""The tables of lead.md: what was to be reached, and what the runs gave."""

import json
from pathlib import Path
from statistics import median_low
from typing import Any

__all__ = ["read", "report"]

KIB, MIB = 1 << 10, 1 << 20
KINDS = ("rotated", "cached")

Row = dict[str, Any]
Key = tuple[int, str, int, str]  # ranks, collective, bytes, buffers
Ratios = dict[Key, dict[str, float]]  # against "best" and "gloo"


def read(folder: Path) -> dict[str, list[Row]]:
    """Return the rows of one run by file."""
    return {path.stem: json.loads(path.read_text())["rows"] for path in sorted(folder.glob("*.json"))}


def report(runs: list[dict[str, list[Row]]]) -> str:
    """Return lead.md: what was to be reached, and the least that each run gave, over all sizes of a line."""
    everything = [{file: compare(rows) for file, rows in run.items()} for run in runs]
    lines = [
        "# The lead, run by run",
        "",
        "Times of the best peer over those of ringcomm, float32, sum; of all sizes in a line the least, with its size.",
        "",
        "| ranks | collective | sizes | buffers | to reach |" + "".join(f" run {i + 1} |" for i in range(len(runs))),
        "|---|---|---|---|---|" + "---|" * len(runs),
    ]
    for ranks, collective, low, high, buffers, goal, peers in LEAD:
        found = []
        for run in everything:
            cells = [
                (pair[peers], size)
                for file in run.values()
                for (n, which, size, kind), pair in file.items()
                if n == ranks and collective in (which, "others" if which != "all_reduce" else None)
                if low <= size <= high and kind == buffers and peers in pair
            ]
            found.append(f"{min(cells)[0]:.2f} ({readable(min(cells)[1])})" if cells else "")
        what = collective + (" against Gloo" if peers == "gloo" else "")
        lines.append(
            f"| {ranks} | {what} | {readable(low)} – {readable(high)} | {buffers} | {goal} | {' | '.join(found)} |"
        )
    lines += ["", "all_reduce on 2 ranks, µs, the middle of the runs, rotated buffers:", "", *times(runs)]
    lines += ["", "Every size of all_reduce, the middle of the runs, rotated / cached:", ""]
    lines += [*table(everything, "all_reduce-2"), "", *table(everything, "all_reduce-4-8")]
    lines += ["", "Every size of the other collectives on 2 ranks, the middle of the runs, rotated / cached:", ""]
    lines += table(everything, "others-2")
    symmetric = " · ".join(f"{least_symmetric(run):.2f}" for run in runs if "symmetric-2" in run)
    lines += ["", "Symmetric buffers, 2 ranks: busbw over memcpy of the same moment, the least of 16 MiB and more."]
    lines += [f"To reach: 0.8. Runs: {symmetric}", ""]
    lines += [
        "Byte rate over that of float32 sum, the middle of the runs, the least of 1 to 64 MiB; to reach: 0.8",
        "",
    ]
    lines += [" · ".join(f"{kind} {value:.2f}" for kind, value in rates(runs).items()), ""]
    return "\n".join(lines)


# ranks, collective, sizes from, to, buffers, what is to be reached, against whom
LEAD: list[tuple[int, str, int, int, str, float, str]] = [
    *((2, "all_reduce", 4, KIB, kind, 1.25, "best") for kind in KINDS),
    *((2, "all_reduce", 4 * KIB, 16 * KIB, kind, 1.5, "best") for kind in KINDS),
    (2, "all_reduce", 64 * KIB, 4 * MIB, "cached", 1.5, "best"),
    (2, "all_reduce", 64 * KIB, 4 * MIB, "rotated", 2.0, "best"),
    *((2, "all_reduce", 16 * MIB, 256 * MIB, kind, 3.0, "best") for kind in KINDS),
    *((n, "all_reduce", 4, KIB, kind, 1.7, "best") for n in (4, 8) for kind in KINDS),
    *((n, "all_reduce", 4 * KIB, 64 * MIB, kind, 2.5, "best") for n in (4, 8) for kind in KINDS),
    *((2, "others", 0, 16 * KIB, kind, 1.0, "best") for kind in KINDS),
    *((2, "others", 64 * KIB, 64 * MIB, kind, 1.5, "best") for kind in KINDS),
    *((2, "all_reduce", 4, 64 * KIB, kind, 20.0, "gloo") for kind in KINDS),
    *((2, "all_reduce", 256 * KIB, 256 * MIB, kind, 5.0, "gloo") for kind in KINDS),
]


def compare(rows: list[Row]) -> Ratios:
    """Return the ratios to the best peer and to Gloo."""
    groups: Ratios = {}
    for row in rows:
        if row["wrong"]:
            continue
        key = row["ranks"], row["collective"], row["bytes"], row["buffers"]
        groups.setdefault(key, {})[row["library"]] = row["median"]
    found: Ratios = {}
    for key, times in groups.items():
        ours = times.pop("ringcomm", None)
        if ours and times:
            found[key] = {"best": min(times.values()) / ours}
            if "gloo" in times:
                found[key]["gloo"] = times["gloo"] / ours
    return found


def times(runs: list[dict[str, list[Row]]]) -> list[str]:
    found: dict[str, dict[int, list[float]]] = {}
    for row in (row for run in runs for row in run.get("all_reduce-2", [])):
        if row["buffers"] == "rotated":
            found.setdefault(row["library"], {}).setdefault(row["bytes"], []).append(row["median"] * 1e6)
    sizes = [4, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
    head = ["| |" + "".join(f" {readable(size)} |" for size in sizes), "|---|" + "---|" * len(sizes)]
    cells = {
        name: [short(median_low(mine[size])) if size in mine else "" for size in sizes] for name, mine in found.items()
    }
    return head + [f"| {name} | {' | '.join(row)} |" for name, row in cells.items()]


def short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def table(everything: list[dict[str, Ratios]], file: str) -> list[str]:
    runs = [run[file] for run in everything if file in run]
    keys = [key for run in runs for key in run]
    lines = list(dict.fromkeys((n, which) for n, which, _, _ in keys))
    sizes = sorted({size for _, _, size, _ in keys})
    wide = [size for size in sizes if any(size == s for s in (4**i for i in range(1, 20)))] or sizes

    def cell(n: int, which: str, size: int) -> str:
        # The sizes of collectives in blocks are whole blocks: the nearest one stands for it.
        near = [s for m, w, s, _ in keys if (m, w) == (n, which) and size / 2 < s < size * 2]
        at = min(near, key=lambda s: abs(s - size)) if near else size
        kinds = [[run[n, which, at, kind]["best"] for run in runs if (n, which, at, kind) in run] for kind in KINDS]
        return " / ".join(f"{median_low(values):.2f}" for values in kinds if values)

    head = [
        "| ranks | collective |" + "".join(f" {readable(size)} |" for size in wide),
        "|---|---|" + "---|" * len(wide),
    ]
    return head + [f"| {n} | {which} |" + "".join(f" {cell(n, which, s)} |" for s in wide) for n, which in lines]


def least_symmetric(run: dict[str, list[Row]]) -> float:
    rows = [row for row in run["symmetric-2"] if row["bytes"] >= 16 * MIB and row["buffers"] == "rotated"]
    return min(row["busbw"] / row["memcpy"] for row in rows)


def rates(runs: list[dict[str, list[Row]]]) -> dict[str, float]:
    """Return, for each dtype and operation, the least of its byte rates over those of float32 and sum at that size."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for file in ("types-2", "operations-2"):
            rows = [row for row in run.get(file, []) if row["buffers"] == "rotated"]
            base = {row["bytes"]: row["busbw"] for row in rows if (row["dtype"], row["op"]) == ("float32", "sum")}
            kinds = dict.fromkeys((row["dtype"], row["op"]) for row in rows)
            for kind in kinds:
                least = min(row["busbw"] / base[row["bytes"]] for row in rows if (row["dtype"], row["op"]) == kind)
                if kind != ("float32", "sum"):
                    found.setdefault(kind[0] if file == "types-2" else kind[1], []).append(least)
    return {kind: median_low(values) for kind, values in found.items()}


def readable(size: int) -> str:
    for suffix, unit in (("MiB", MIB), ("KiB", KIB)):
        if size >= unit:
            return f"{size // unit} {suffix}"
    return f"{size} B"
