"""The output of a benchmark: a table with the speedup of ringcomm over the best peer, and JSON."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcomm.bench.comparison import Comparison, LibraryFailure, Measurement
from ringcomm.bench.interrupts import deferred_signals
from ringcomm.bench.machine import Machine
from ringcomm.bench.noise import BURST, PERIOD
from ringcomm.bench.starts import START_SECONDS
from ringcomm.bench.sweep import Sweep
from ringcomm.machine import files

__all__ = ["Results", "header", "missing_text", "rows_text", "starts_text", "write_json"]

Columns = tuple[tuple[str, str, int], ...]

CASE_COLUMNS: Columns = (
    *(("size", "(B)", 12), ("count", "(elements)", 12), ("type", "", 10), ("redop", "", 6), ("root", "", 5)),
    ("library", "", 18),
)
COLUMNS: Columns = (
    *CASE_COLUMNS,
    *(("time", "(us)", 11), ("p10", "", 10), ("p90", "", 10), ("p99", "", 10)),
    *(("algbw", "(GB/s)", 8), ("busbw", "(GB/s)", 8), ("#wrong", "", 7), ("speedup", "", 9)),
    *(("cached", "(us)", 11), ("busbw", "(GB/s)", 8), ("speedup", "", 9)),
)
START_COLUMNS: Columns = (
    *CASE_COLUMNS,
    *(("usual", "(us)", 11), ("start", "(us)", 11), ("worst", "(us)", 11), ("worst", "/usual", 8), ("#wrong", "", 7)),
)


@dataclass
class Results:
    """All that a benchmark found."""

    machine: Machine
    sweep: Sweep
    placement: dict[int, str] = field(default_factory=dict)  # of so many ranks, in words
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: list[LibraryFailure] = field(default_factory=list)
    rows: list[Measurement] = field(default_factory=list)
    lines: list[float] = field(default_factory=list)  # seconds a cache line takes between two cores and back


def header(machine: Machine, comparison: Comparison) -> str:
    """Return the lines above the table: machine, libraries, options, and the names of the columns."""
    sweep, ranks = comparison.sweep, comparison.ranks
    versions = {job.name: job.versions for job in comparison.jobs}
    commit = f", commit {machine.commit}" if machine.commit else ""
    options = [
        f"{'in' if sweep.in_place else 'out of'} place where the collective allows it",
        f"libraries in turn, {sweep.rounds} {'starts' if sweep.unbound else 'rounds'} each",
        *["symmetric buffers (ringcomm)"] * sweep.symmetric,
        *["shared arrays (ringcomm)"] * sweep.shared_arrays,
        *["asynchronous calls"] * sweep.asynchronous,
        *[f"with noise: {BURST * 1e3:.0f} ms of work in every {PERIOD * 1e3:.0f} ms on each core"] * sweep.noise,
    ]
    lines = [
        f"{machine.cpu}, {machine.cores} cores, {machine.cache >> 20} MiB last-level cache, {machine.system}",
        f"Python {machine.python}, {machine.date}{commit}",
        *(f"{name}: {', '.join(f'{what} {v}' for what, v in facts.items())}" for name, facts in versions.items()),
        f"{', '.join(sweep.collectives)}; {ranks} ranks {comparison.placement}; {'; '.join(options)}",
    ]
    length = f"{sweep.round_seconds * 1e3:.0f} ms"
    if sweep.unbound:
        lines += [
            f"start, worst: mean time of the first calls of fresh ranks, {START_SECONDS:g} s long, on the slowest rank",
            f"usual: later in the same starts, in rounds of {length}; usual, start: median of the starts",
            "no warm-ups, the same buffer every time",
        ]
    else:
        what = f"the mean time of the calls that fit into {length}, on the slowest rank"
        lines.append(f"a round is {what}; time: median round")
    lines += about_device(machine, sweep.device, ranks)
    if not sweep.unbound and any("/" in name for name in versions):
        lines.append("variants (openmpi/multiple) have a line where they differ from their library; --json has all")
    for kind, values in machine.settings.items():
        lines.append(f"ringcomm's settings from the {kind}: {', '.join(f'{n}={v}' for n, v in values.items())}")
    if not sweep.unbound:
        lines.append(f"buffers rotate through {sweep.pool >> 20} MiB per rank; cached: the same buffer every time")
    columns = START_COLUMNS if sweep.unbound else COLUMNS
    names, units = (cells([column[i] for column in columns], columns)[2:] for i in (0, 1))
    return "\n".join(f"# {line}".rstrip() for line in [*lines, "", names, units])


def about_device(machine: Machine, device: str, ranks: int) -> list[str]:
    """Return the limits of figures that are not of host memory."""
    if device == "emulated":
        return ["buffers on the emulated device, which runs on the CPU: tests correctness, not speed"]
    if device == "host":
        return []
    lines = [f"buffers on {len(machine.gpus)} x {machine.gpus[0]}; the calls of a round are queued, then synchronized"]
    if ranks > len(machine.gpus):
        lines.append("same GPU: measures memory and scheduling, not NVLink")
        lines.append("without NVIDIA's MPS the kernels of the ranks take turns of about 2 ms")
    return lines


def rows_text(rows: list[Measurement]) -> str:
    """Return the lines of one case: one per library, rotated and cached figures side by side."""
    best = best_peers(rows)
    lines = []
    for name in dict.fromkeys(m.library for m in shown(rows)):
        mine = {m.buffers: m for m in rows if m.library == name}
        m = mine.get("rotated") or mine["cached"]
        cached = mine.get("cached")
        gain = {kind: f"{best[kind].median / mine[kind].median:.2f}" for kind in best if name == "ringcomm"}
        wrong = "" if m.wrong is None else max(each.wrong or 0 for each in mine.values())
        line = case_cells(m)
        line += [microseconds(t) for t in (m.median, m.p10, m.p90, m.p99)]
        line += [f"{m.algbw / 1e9:.2f}", f"{m.busbw / 1e9:.2f}", wrong, gain.get(m.buffers, "")]
        if cached and cached is not m:
            line += [microseconds(cached.median), f"{cached.busbw / 1e9:.2f}", gain.get("cached", "")]
        lines.append(cells(line + [""] * (len(COLUMNS) - len(line)), COLUMNS).rstrip())
    return "\n".join(lines)


def missing_text(failure: LibraryFailure, rows: list[Measurement]) -> str:
    """Return the line of a library that could not do this case, beside the rows of the others."""
    case = case_cells(rows[0])[:-1] if rows else [failure.bytes, "", "", "", ""]
    return f"{cells([*case, failure.library], CASE_COLUMNS)}  not measured: {failure.reason}"


def starts_text(rows: list[Measurement]) -> str:
    """Return the lines of one case of unbound ranks, one per library."""
    lines = []
    for m in rows:
        settled = m.settled or m.median
        line = [*case_cells(m), *(microseconds(t) for t in (settled, m.median, m.worst))]
        line += [f"{m.worst / settled:.2f}", "" if m.wrong is None else m.wrong]
        lines.append(cells(line, START_COLUMNS).rstrip())
    return "\n".join(lines)


def case_cells(m: Measurement) -> list[object]:
    return [m.bytes, m.count, m.dtype, m.op or "none", -1 if m.root is None else m.root, m.library]


def best_peers(rows: list[Measurement]) -> dict[str, Measurement]:
    """Return the fastest peer with each kind of buffers."""
    peers = sorted((m for m in rows if m.library != "ringcomm" and not m.wrong), key=lambda m: -m.median)
    return {m.buffers: m for m in peers}


def shown(rows: list[Measurement]) -> list[Measurement]:
    """Leave out variants (openmpi/multiple) that do not differ from their library, unless they are the best peer."""
    default = {(m.library, m.buffers): m for m in rows}
    best = best_peers(rows).values()

    def differs(m: Measurement) -> bool:
        base = default.get((m.library.partition("/")[0], m.buffers))
        return base is None or base is m or m in best or m.p10 > base.p90 or m.p90 < base.p10

    return [m for m in rows if differs(m)]


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


def cells(values: Iterable[object], columns: Columns) -> str:
    return " ".join(f"{value!s:>{width - 1}}" for value, (_, _, width) in zip(values, columns, strict=True))


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write results, one of their "rows" per line. Signals wait meanwhile."""
    head = json.dumps({name: value for name, value in document.items() if name != "rows"}, indent=1)[:-2]
    rows = ",\n".join(json.dumps({name: rounded(value) for name, value in row.items()}) for row in document["rows"])
    with deferred_signals():
        files.write_atomic(path, f'{head},\n "rows": [\n{rows}\n ]\n}}\n'.encode())


def rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value
