"""The tables of docs/performance.md, from the results of run.py.

python benchmarks/tables.py    writes them into the page
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from ringcomm.options import readable

__all__ = ["PAGE", "RESULTS", "page", "tables"]

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "2026-11-20-amd-epyc-family-26-model-2-2-cores.json"  # of the present machine
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- tables: benchmarks/tables.py -->\n", "<!-- end of tables -->\n"
KIB, MIB = 1 << 10, 1 << 20
SIZES: list[int] = [4**i for i in range(1, 15)]  # 4 B to 256 MiB
KINDS = ("rotated", "cached")

Row = dict[str, Any]


def page(text: str, data: dict[str, Any]) -> str:
    """Return the text of the page with the tables of these results."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + tables(data) + END + rest.partition(END)[2]


def tables(data: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in data["rows"]:
        rows[row["measurement"]].append(row)
    machine = data["machine"]
    symmetric = [row for row in rows["symmetric-2"] if row["bytes"] >= 16 * MIB and row["buffers"] == "rotated"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['cache'] >> 20} MiB last-level cache; "
        f"{machine['system']}; Python {machine['python']}; {machine['date'][:10]}.",
        "all_reduce, 2 ranks, rotated buffers, µs:",
        times(rows["all_reduce-2"]),
        "Speedup over the fastest peer at each size, rotated / cached buffers:",
        speedups(rows["all_reduce-2"] + rows["all_reduce-4-8"] + rows["others-2"]),
        f"Symmetric buffers, all_reduce of 16 MiB and more on 2 ranks: busbw is at least "
        f"{min(row['busbw'] / row['memcpy'] for row in symmetric):.2f} times the bandwidth of a plain copy.",
        "Byte rate over that of float32 sum, all_reduce on 2 ranks, the lowest of 1 to 64 MiB: "
        + ", ".join(f"{name} {rate:.2f}" for name, rate in rates(rows).items())
        + ".",
    ]
    return "\n" + "\n\n".join(lines) + "\n\n"


def times(rows: list[Row]) -> str:
    sizes = [size for size in SIZES if size not in (16, 64, 256, 4 * KIB)]
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["buffers"] == "rotated":
            found[row["library"]][row["bytes"]] = row["median"] * 1e6
    return table(sizes, {name: [short(mine[size]) for size in sizes] for name, mine in found.items()})


def speedups(rows: list[Row]) -> str:
    """Return the times of the fastest peer over those of ringcomm."""
    groups: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if not row["wrong"]:
            what = f"{row['collective']}, {row['ranks']} ranks"
            groups[what, row["bytes"], row["buffers"]][row["library"]] = row["median"]
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (what, size, kind), medians in groups.items():
        ours = medians.pop("ringcomm")
        if medians:
            found[what][nearest(size)][kind] = min(medians.values()) / ours
    sizes = [size for size in [0, *SIZES] if any(size in each for each in found.values())]
    cells = {
        what: [" / ".join(short(each[size][kind]) for kind in KINDS if kind in each[size]) for size in sizes]
        for what, each in found.items()
    }
    return table(sizes, cells)


def nearest(size: int) -> int:
    """Return the column of a size: arrays of equal blocks are a few bytes shorter than asked for."""
    return min([0, *SIZES], key=lambda column: abs(column - size))


def rates(rows: dict[str, list[Row]]) -> dict[str, float]:
    """Return the lowest byte rate of each dtype and operation over that of float32 sum at the same size."""
    found: dict[str, float] = {}
    for measurement, name in (("types-2", "dtype"), ("operations-2", "op")):
        rotated = [row for row in rows[measurement] if row["buffers"] == "rotated"]
        base = {row["bytes"]: row["busbw"] for row in rotated if (row["dtype"], row["op"]) == ("float32", "sum")}
        for row in rotated:
            if (row["dtype"], row["op"]) != ("float32", "sum"):
                rate = row["busbw"] / base[row["bytes"]]
                found[row[name]] = min(rate, found.get(row[name], rate))
    return found


def table(sizes: list[int], rows: dict[str, list[str]]) -> str:
    lines = [f"| | {' | '.join(map(readable, sizes))} |", "|---|" + "---|" * len(sizes)]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(row)} |" for name, row in rows.items())])


def short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), json.loads(RESULTS.read_text())))
