"""The output of a benchmark: a table, JSON, and the speedup of ringcomm over the best peer."""

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ringcomm.bench.comparison import LibraryFailure, Measurement
from ringcomm.bench.machine import Machine
from ringcomm.bench.plan import BenchPlan
from ringcomm.machine import files

__all__ = ["Speedup", "header", "progress", "rows_text", "speedups", "write_json"]

COLUMNS = (
    *(("size", "(B)", 12), ("count", "(elements)", 12), ("type", "", 10), ("redop", "", 6), ("root", "", 5)),
    *(("library", "", 18), ("time", "(us)", 11), ("p10", "", 10), ("p90", "", 10), ("p99", "", 10)),
    *(("algbw", "(GB/s)", 8), ("busbw", "(GB/s)", 8), ("#wrong", "", 7), ("speedup", "", 9)),
    *(("cached", "(us)", 11), ("busbw", "(GB/s)", 8), ("speedup", "", 9)),
)


@dataclass(frozen=True)
class Speedup:
    """The time of the best peer over that of ringcomm."""

    ours: Measurement
    best: Measurement

    @property
    def value(self) -> float:
        return self.best.median / self.ours.median

    def __str__(self) -> str:
        m = self.ours
        where = f"{m.collective} of {m.bytes} bytes on {m.ranks} ranks, {m.buffers} buffers"
        return f"{where}: {self.value:.2f} x {self.best.library}"


def speedups(rows: Iterable[Measurement]) -> list[Speedup]:
    """Compare ringcomm with the fastest peer, for every size and kind of buffers that both have."""
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for m in rows:
        groups.setdefault((m.ranks, m.collective, m.dtype, m.op, m.bytes, m.buffers), []).append(m)
    found = []
    for group in groups.values():
        ours = [m for m in group if m.library == "ringcomm"]
        peers = [m for m in group if m.library != "ringcomm" and not m.wrong]
        if ours and peers:
            found.append(Speedup(ours[0], min(peers, key=lambda m: m.median)))
    return found


def header(machine: Machine, plan: BenchPlan, ranks: int, versions: dict[str, dict[str, str]]) -> str:
    """Return the lines above the table: machine, libraries, options, and the names of the columns."""
    commit = f", commit {machine.commit}" if machine.commit else ""
    bound = "one core each" if ranks <= machine.cores else f"{machine.cores} cores in turn (oversubscribed)"
    options = [
        f"{'in' if plan.in_place else 'out of'} place where the collective allows it",
        f"libraries in turn, {plan.rounds} rounds each",
        *["symmetric buffers (ringcomm)"] * plan.symmetric,
        *["asynchronous calls"] * plan.asynchronous,
    ]
    lines = [
        f"{machine.cpu}, {machine.cores} cores, {machine.cache >> 20} MiB last-level cache, {machine.system}",
        f"Python {machine.python}, {machine.date}{commit}",
        *(f"{name}: {', '.join(f'{what} {v}' for what, v in facts.items())}" for name, facts in versions.items()),
        f"{', '.join(plan.collectives)}; {ranks} ranks bound to {bound}; {'; '.join(options)}",
    ]
    lines.append("a round is the mean time of the calls that fit into 5 ms, on the slowest rank; time: median round")
    lines += about_device(machine, plan, ranks)
    for kind, values in machine.settings.items():
        lines.append(f"ringcomm's settings from the {kind}: {', '.join(f'{n}={v}' for n, v in values.items())}")
    lines.append(f"buffers rotate through {plan.pool >> 20} MiB per rank; cached: the same buffer every time")
    names, units = (cells([column[i] for column in COLUMNS])[2:] for i in (0, 1))
    return "\n".join(f"# {line}".rstrip() for line in [*lines, "", names, units])


def about_device(machine: Machine, plan: BenchPlan, ranks: int) -> list[str]:
    """Return the limits of figures that are not of host memory."""
    if plan.device == "emulated":
        return ["buffers on the emulated device, which runs on the CPU: tests correctness, not speed"]
    if plan.device == "host":
        return []
    lines = [f"buffers on {len(machine.gpus)} x {machine.gpus[0]}; the calls of a round are queued, then synchronized"]
    if ranks > len(machine.gpus):
        lines.append("same GPU: measures memory and scheduling, not NVLink")
    return lines


def rows_text(rows: list[Measurement]) -> str:
    """Return the lines of one size: one per library, rotated and cached figures side by side."""
    speedup = {each.ours.buffers: f"{each.value:.2f}" for each in speedups(rows)}
    lines = []
    for name in dict.fromkeys(m.library for m in shown(rows)):
        mine = {m.buffers: m for m in rows if m.library == name}
        m = mine.get("rotated") or mine["cached"]
        cached = mine.get("cached")
        gain = speedup if name == "ringcomm" else {}
        wrong = "" if m.wrong is None else max(each.wrong or 0 for each in mine.values())
        line: list[object] = [m.bytes, m.count, m.dtype, m.op or "none", -1 if m.root is None else m.root, name]
        line += [microseconds(t) for t in (m.median, m.p10, m.p90, m.p99)]
        line += [f"{m.algbw / 1e9:.2f}", f"{m.busbw / 1e9:.2f}", wrong, gain.get(m.buffers, "")]
        if cached and cached is not m:
            line += [microseconds(cached.median), f"{cached.busbw / 1e9:.2f}", gain.get("cached", "")]
        lines.append(cells(line + [""] * (len(COLUMNS) - len(line))).rstrip())
    return "\n".join(lines)


def shown(rows: list[Measurement]) -> list[Measurement]:
    """Leave out variants (openmpi/multiple) that do not differ from their library, unless they are the best peer."""
    default = {(m.library, m.buffers): m for m in rows}
    best = [speedup.best for speedup in speedups(rows)]

    def differs(m: Measurement) -> bool:
        base = default.get((m.library.partition("/")[0], m.buffers))
        return base is None or base is m or m in best or m.p10 > base.p90 or m.p90 < base.p10

    return [m for m in rows if differs(m)]


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


def cells(values: Iterable[object]) -> str:
    return " ".join(f"{value!s:>{width - 1}}" for value, (_, _, width) in zip(values, COLUMNS, strict=True))


def progress(share: float, what: str) -> None:
    """Draw a progress bar on standard error if that is a terminal; clear it at the end."""
    if not sys.stderr.isatty():
        return
    bar = "" if share >= 1 else f"[{'#' * int(30 * share):30}] {what}"[: shutil.get_terminal_size().columns - 1]
    print(f"\r\x1b[K{bar}", end="", file=sys.stderr, flush=True)


def write_json(
    path: Path,
    machine: Machine,
    plan: BenchPlan,
    versions: dict[str, dict[str, str]],
    rows: list[Measurement],
    failures: list[LibraryFailure],
) -> None:
    document = {
        "machine": asdict(machine),
        "plan": asdict(plan),
        "versions": versions,
        "failures": [asdict(failure) for failure in failures],
    }
    lines = [json.dumps({name: rounded(value) for name, value in asdict(m).items()}) for m in rows]
    head = json.dumps(document, indent=1).removesuffix("\n}")
    text = f'{head},\n "rows": [\n' + ",\n".join(lines) + "\n ]\n}\n"  # a row per line
    files.write_atomic(path, text.encode())


def rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value
