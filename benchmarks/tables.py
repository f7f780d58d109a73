"""The figures of all machines in docs/performance.md, and those of the median machine in README.md, from results/.

python benchmarks/tables.py    writes them into both
"""

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ringcomm.options import readable

__all__ = ["PAGES", "page", "results"]

HERE = Path(__file__).parent
BEGIN, END = "<!-- tables: benchmarks/tables.py -->\n", "<!-- end of tables -->\n"
KIB, MIB = 1 << 10, 1 << 20
SIZES: list[int] = [4**i for i in range(1, 15)]  # 4 B to 256 MiB
KINDS = ("rotated", "cached")
ARCHITECTURES = {"family 25, model 17": "Zen 4", "family 26, model 2": "Zen 5"}

Row = dict[str, Any]
Speedups = dict[str, dict[int, dict[str, float]]]  # what → size → kind of buffers → factor


class Results:
    """The kept results of a machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = json.loads(path.read_text())
        self.machine: dict[str, Any] = data["machine"]
        self.lines: list[float] = data.get("lines", [])  # not of results of 2026-11-20
        self.rows: dict[str, list[Row]] = defaultdict(list)  # by measurement
        for row in data["rows"]:
            self.rows[row["measurement"]].append(row)

    @property
    def name(self) -> str:
        known = [name for cpu, name in ARCHITECTURES.items() if cpu in self.machine["cpu"]]
        return f"{', '.join([self.machine['cpu'], *known])}; {self.machine['cores']} cores"

    @property
    def date(self) -> str:
        return str(self.machine["date"][:10])

    @property
    def all_reduce(self) -> list[Row]:
        """The rows of all_reduce of private arrays on 2 ranks."""
        return self.rows["all_reduce-2-small"] + self.rows["all_reduce-2"]

    def gains(self) -> list[float]:
        """Return the speedups of all_reduce on 2 ranks with rotated buffers, by size."""
        [found] = speedups(self.all_reduce).values()
        return [each["rotated"] for each in found.values()]


def results() -> list[Results]:
    """Return the latest results of each machine, the best speedup of all_reduce first."""
    latest = {re.sub(r"^[\d-]{10}-", "", path.stem): path for path in sorted((HERE / "results").glob("*-cores.json"))}
    return sorted(map(Results, latest.values()), key=lambda each: -geometric_mean(each.gains()))


def page(text: str, tables: str, begin: str = BEGIN) -> str:
    """Return the text of a page with these tables."""
    before, _, rest = text.partition(begin)
    return before + begin + tables + END + rest.partition(END)[2]


def of_performance(machines: list[Results]) -> str:
    return joined(part for each in machines for part in of_machine(each))


def of_machine(found: Results) -> Iterator[str]:
    rows, machine = found.rows, found.machine
    yield f"### {found.name}"
    facts = (
        f"{machine['cache'] >> 20} MiB last-level cache",
        *[
            f"a cache line there and back {short(min(each) * 1e9)} to {short(max(each) * 1e9)} ns"
            for each in [found.lines]
            if each
        ],
        machine["system"],
        f"Python {machine['python']}",
        found.date,
    )
    yield f"{'; '.join(facts)}."
    yield "all_reduce, 2 ranks, rotated buffers, µs:"
    yield times(found.all_reduce)
    yield "Speedup over the fastest peer at each size, rotated / cached buffers:"
    names = ("all_reduce-4-small", "all_reduce-4", "all_reduce-4-8", "others-2-small", "others-2")
    yield factors(speedups(found.all_reduce + [row for name in names for row in rows[name]]))
    if shared := rows["shared_arrays-2"]:
        yield "The same for arrays of `comm.shared_arrays()`, and the bus bandwidth of all_reduce over that of a copy:"
        yield factors(speedups(shared) | {"all_reduce, busbw / memcpy": over_memcpy(shared)})
    if unbound := rows["unbound-2"]:
        yield (
            f"Unbound ranks, 1 KiB, µs: usual time / the worst of {unbound[0]['rounds']} starts in its first 0.3 s "
            "(their ratio):"
        )
        yield starts(unbound)
    if noise := rows["noise-2-small"] + rows["noise-2"]:
        yield "With noise, speedup over Open MPI, rotated / cached buffers:"
        yield factors(speedups([row for row in noise if row["library"].startswith(("ringcomm", "openmpi"))]))
    if symmetric := [row for row in rows["symmetric-2"] if row["bytes"] >= 16 * MIB and row["buffers"] == "rotated"]:
        yield (
            "Symmetric buffers, all_reduce of 16 MiB and more on 2 ranks: busbw is at least "
            f"{min(row['busbw'] / row['memcpy'] for row in symmetric):.2f} times the bandwidth of a plain copy."
        )
    if found_rates := rates(rows):
        yield (
            "Byte rate over that of float32 sum, all_reduce on 2 ranks, the lowest of 1 to 64 MiB: "
            f"{', '.join(f'{name} {rate:.2f}' for name, rate in found_rates.items())}."
        )


def of_readme(machines: list[Results]) -> str:
    median = machines[len(machines) // 2]  # of two the slower
    others = [each for each in machines if each is not median]
    parts = [
        f"{median.name}; {median.date}:",
        times(median.all_reduce),
        f"![time and bus bandwidth over the size](benchmarks/results/{median.path.stem}.png)",
        "Speedup over the fastest of these at each size: geometric mean, lowest to highest, here and elsewhere:",
        "\n".join(f"- {summary(each)}" for each in [median, *others]),
    ]
    return joined(parts)


def summary(found: Results) -> str:
    gains = found.gains()
    return f"{found.name}: {geometric_mean(gains):.2f}, {min(gains):.2f} to {max(gains):.2f}"


def times(rows: list[Row]) -> str:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["buffers"] == "rotated" and row["bytes"] not in (16, 64, 256, 4 * KIB):
            found[row["library"]][row["bytes"]] = row["median"] * 1e6
    sizes = sorted({size for mine in found.values() for size in mine})
    cells = {name: [short(mine[size]) if size in mine else "" for size in sizes] for name, mine in found.items()}
    return table(map(readable, sizes), cells)


def speedups(rows: list[Row]) -> Speedups:
    """Return the times of the fastest peer over those of ringcomm."""
    groups: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if not row["wrong"]:
            what = f"{row['collective']}, {row['ranks']} ranks"
            groups[what, row["bytes"], row["buffers"]][row["library"]] = row["median"]
    found: Speedups = defaultdict(lambda: defaultdict(dict))
    for (what, size, kind), medians in groups.items():
        ours = medians.pop("ringcomm")
        if medians:
            found[what][nearest(size)][kind] = min(medians.values()) / ours
    return found


def over_memcpy(rows: list[Row]) -> dict[int, dict[str, float]]:
    """Return the bus bandwidth of all_reduce over that of a copy in the same run."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if (row["library"], row["collective"]) == ("ringcomm", "all_reduce"):
            found[row["bytes"]][row["buffers"]] = row["busbw"] / row["memcpy"]
    return found


def factors(found: Speedups) -> str:
    sizes = [size for size in [0, *SIZES] if any(size in each for each in found.values())]
    cells = {
        what: [" / ".join(short(each[size][kind]) for kind in KINDS if kind in each.get(size, {})) for size in sizes]
        for what, each in found.items()
    }
    return table(map(readable, sizes), cells)


def starts(rows: list[Row]) -> str:
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        usual, worst = row["settled"], row["worst"]
        found[row["collective"]][row["library"]] = (
            f"{short(usual * 1e6)} / {short(worst * 1e6)} ({short(worst / usual)})"
        )
    return table(libraries, {what: [each.get(name, "") for name in libraries] for what, each in found.items()})


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


def table(columns: Iterable[str], rows: dict[str, list[str]]) -> str:
    names = list(columns)
    lines = [f"| | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(row)} |" for name, row in rows.items())])


def joined(parts: Iterable[str]) -> str:
    """Return tables and prose, which is filled to 120 characters as that of all pages is."""
    fill = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
    return "\n" + "\n\n".join(part if part.startswith(("|", "#", "!", "- ")) else fill(part) for part in parts) + "\n\n"


def short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


PAGES: dict[Path, Callable[[list[Results]], str]] = {
    HERE.parent / "docs" / "performance.md": of_performance,
    HERE.parent / "README.md": of_readme,
}

if __name__ == "__main__":
    for path, make in PAGES.items():
        path.write_text(page(path.read_text(), make(results())))
