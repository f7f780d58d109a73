"""The tables of notes/<date>-mpi.md, from the results of mpi.py."""

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["tables"]

KIB, MIB = 1 << 10, 1 << 20
LINK = 125e6  # bytes per second in each direction: 1 Gbit/s
NAMES = {"openmpi": "Open MPI", "mpich": "MPICH"}
CONTENDERS = {
    "MPI": "its own",
    "ring": "ring",
    "chosen": "chosen by cost",
    "two hosts": "hierarchy, 2 hosts",
    "two hosts, symmetric": "hierarchy, symmetric",
    "one host": "shm alone",
    "one host, symmetric": "shm alone, symmetric",
    "copy": "a copy of the array",
}
Row = dict[str, Any]


class Times:
    """The rows of one library in one case."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = {(row["contender"], row["bytes"]): row for row in rows}
        self.contenders = [each for each in CONTENDERS if any(each == contender for contender, _ in self.rows)]
        self.sizes = list(dict.fromkeys(size for _, size in self.rows))

    def median(self, contender: str, size: int) -> float:
        return float(self.rows[contender, size]["median"])

    def lead(self, contender: str, size: int) -> float:
        return self.median("MPI", size) / self.median(contender, size)

    def busbw(self, contender: str, size: int) -> float:
        n: int = self.rows[contender, size]["ranks"]
        return 2 * (n - 1) / n * size / self.median(contender, size)

    def step(self, method: str, clock: str) -> float:
        """Return the seconds of one step, wall clock or CPU of a rank: the slope from few steps to many."""
        times = self._of_steps(method, clock)
        few, many = min(times), max(times)
        return (times[many] - times[few]) / (many - few)

    def beside(self, method: str, clock: str) -> float:
        """Return the seconds of a call without its steps."""
        times = self._of_steps(method, clock)
        few = min(times)
        return times[few] - few * self.step(method, clock)

    def _of_steps(self, method: str, clock: str) -> dict[int, float]:
        """Return the seconds of a call by its number of steps."""
        found = {}
        for (name, _), row in self.rows.items():
            kind, count = name.split()
            if kind == method:
                found[int(count)] = row["median"] if clock == "wall" else row["cpu"] / row["ranks"]
        return found


def tables(data: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    cases: dict[str, dict[str, Times]] = {}
    for case in ("2 ranks", "4 ranks", "link", "steps"):
        libraries = dict.fromkeys(row["library"] for row in data["rows"] if row["case"] == case)
        cases[case] = {
            name: Times(row for row in data["rows"] if (row["library"], row["case"]) == (name, case))
            for name in libraries
        }
    blocks = [
        times(cases["2 ranks"]),
        times(cases["4 ranks"]),
        over_the_link(cases["link"]),
        python(cases["steps"]),
        constants(cases),
        model(cases),
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def times(libraries: dict[str, Times]) -> list[str]:
    sizes = next(iter(libraries.values())).sizes
    lines = head("µs (times as fast as its own)", map(words, sizes))
    for library, each in libraries.items():
        for contender in each.contenders:
            lead = "" if contender in ("MPI", "copy") else " ({:.2f})"
            cells = [
                short(each.median(contender, size) * 1e6) + lead.format(each.lead(contender, size)) for size in sizes
            ]
            lines.append(line(f"{NAMES[library]}: {CONTENDERS[contender]}", cells))
    return lines


def over_the_link(libraries: dict[str, Times]) -> list[str]:
    sizes = [size for size in next(iter(libraries.values())).sizes if size >= 64 * KIB]
    lines = head("busbw over 1 Gbit/s", map(words, sizes))
    for library, each in libraries.items():
        for contender in ("MPI", "ring"):
            cells = [f"{each.busbw(contender, size) / LINK:.2f}" for size in sizes]
            lines.append(line(f"{NAMES[library]}: {CONTENDERS[contender]}", cells))
    return lines


def python(libraries: dict[str, Times]) -> list[str]:
    methods = {
        "ringcomm": "a schedule of ringcomm",
        "tests": "mpi4py: Irecv, Isend, Test",
        "Sendrecv": "mpi4py: Sendrecv",
    }
    lines = head("µs, wall clock / CPU of a rank", (NAMES[name] for name in libraries))

    def both(what: str, seconds: Callable[[Times, str], float]) -> str:
        pairs = [[f"{seconds(each, clock) * 1e6:.1f}" for clock in ("wall", "cpu")] for each in libraries.values()]
        return line(what, map(" / ".join, pairs))

    lines += [both(f"a step: {what}", lambda each, clock: each.step(method, clock)) for method, what in methods.items()]  # noqa: B023 (called in this turn)
    return [*lines, both("a call of ringcomm, without its steps", lambda each, clock: each.beside("ringcomm", clock))]


def constants(cases: dict[str, dict[str, Times]]) -> list[str]:
    lines = head("fitted", ["α, µs", "β, GB/s", "γ, GB/s"])
    for case, library, each in fitted(cases):
        row = each.rows["ring", each.sizes[0]]
        cells = [f"{row['alpha'] * 1e6:.1f}", *(f"{1e-9 / row[name]:.3g}" for name in ("beta", "gamma"))]
        lines.append(line(f"{case}, {NAMES[library]}", cells))
    return lines


def model(cases: dict[str, dict[str, Times]]) -> list[str]:
    sizes = cases["2 ranks"]["openmpi"].sizes
    lines = head("predicted over measured", map(words, sizes))
    for case, library, each in fitted(cases):
        for contender in ("ring", "chosen"):
            if contender in each.contenders:
                rows = [each.rows.get((contender, size)) for size in sizes]
                cells = [f"{row['predicted'] / row['median']:.2f}" if row else "" for row in rows]
                lines.append(line(f"{case}, {NAMES[library]}: {CONTENDERS[contender]}", cells))
    return lines


def fitted(cases: dict[str, dict[str, Times]]) -> list[tuple[str, str, Times]]:
    """Return the cases that have constants of the model."""
    found = [(case, library, each) for case in cases for library, each in cases[case].items()]
    return [each for each in found if any("alpha" in row for row in each[2].rows.values())]


def head(first: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    return [line(first, names), "|" + "---|" * (1 + len(names))]


def line(first: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def words(size: int) -> str:
    return f"{size} B" if size < KIB else f"{size // KIB} KiB" if size < MIB else f"{size // MIB} MiB"
