"""What a benchmark says: a table for people, JSON for machines, and how ringcomm compares with the best peer."""

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ringcomm import files
from ringcomm.bench.machine import Machine
from ringcomm.bench.plan import Plan
from ringcomm.bench.rounds import Failure, Measurement

__all__ = ["Ratio", "header", "progress", "ratios", "rows_text", "write_json"]

COLUMNS = (
    *(("size", "(B)", 12), ("count", "(elements)", 12), ("type", "", 10), ("redop", "", 6), ("root", "", 5)),
    *(("library", "", 18), ("time", "(us)", 11), ("p10", "", 10), ("p90", "", 10), ("p99", "", 10)),
    *(("algbw", "(GB/s)", 8), ("busbw", "(GB/s)", 8), ("#wrong", "", 7), ("ratio", "", 7)),
    *(("cached", "(us)", 11), ("busbw", "(GB/s)", 8), ("ratio", "", 7)),
)


@dataclass(frozen=True)
class Ratio:
    """The time of the best peer over that of ringcomm: above 1, ringcomm is faster."""

    ours: Measurement
    best: Measurement

    @property
    def value(self) -> float:
        return self.best.median / self.ours.median

    def __str__(self) -> str:
        m = self.ours
        where = f"{m.collective} of {m.bytes} bytes on {m.ranks} ranks, {m.buffers} buffers"
        return f"{where}: {self.value:.2f} x {self.best.library}"


def ratios(rows: Iterable[Measurement]) -> list[Ratio]:
    """Compare ringcomm with the fastest peer, at every size and kind of buffers that both have."""
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for m in rows:
        groups.setdefault((m.ranks, m.collective, m.dtype, m.op, m.bytes, m.buffers), []).append(m)
    found = []
    for group in groups.values():
        ours = [m for m in group if m.library == "ringcomm"]
        peers = [m for m in group if m.library != "ringcomm" and not m.wrong]
        if ours and peers:
            found.append(Ratio(ours[0], min(peers, key=lambda m: m.median)))
    return found


def header(machine: Machine, plan: Plan, ranks: int, versions: dict[str, dict[str, str]]) -> str:
    """Return the lines above the table: machine, libraries, what is measured, and the names of the columns."""
    commit = f", commit {machine.commit}" if machine.commit else ""
    bound = "a core each" if ranks <= machine.cores else f"{machine.cores} cores in turn (oversubscribed)"
    options = [
        "in place where there is such a form" if plan.in_place else "out of place where there is such a form",
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
    lines.append(
        "a round: the mean time of a call on the slowest rank, of as many in a row as take 5 ms; p10 to p99 of rounds"
    )
    lines += where(machine, plan, ranks)
    for kind, values in machine.settings.items():
        lines.append(f"ringcomm's settings from the {kind}: {', '.join(f'{n}={v}' for n, v in values.items())}")
    if plan.rotate:
        lines.append(f"buffers rotate through {plan.pool >> 20} MiB on each rank; cached: the same buffer every time")
    names, units = (cells([column[i] for column in COLUMNS])[2:] for i in (0, 1))
    return "\n".join(f"# {line}".rstrip() for line in [*lines, "", names, units])


def where(machine: Machine, plan: Plan, ranks: int) -> list[str]:
    """Return what is to be known of figures that are not those of host memory."""
    if plan.device == "emulated":
        return ["buffers on the emulated device, which is the CPU: this shows what is right, not what is fast"]
    if plan.device == "host":
        return []
    lines = [f"buffers on {len(machine.gpus)} x {machine.gpus[0]}; calls in a row are queued, then waited for"]
    if ranks > len(machine.gpus):
        lines.append("same GPU: measures memory and scheduling, not NVLink")
    return lines


def rows_text(rows: list[Measurement]) -> str:
    """Return the lines of one size: a line for each library, rotated and cached figures side by side."""
    against = {(ratio.ours.buffers): f"{ratio.value:.2f}" for ratio in ratios(rows)}
    lines = []
    for name in dict.fromkeys(m.library for m in shown(rows)):
        mine = {m.buffers: m for m in rows if m.library == name}
        m = mine.get("rotated") or mine["cached"]
        cached = mine.get("cached")
        wrong = "" if m.wrong is None else max(each.wrong or 0 for each in mine.values())
        ours = name == "ringcomm"
        line: list[object] = [m.bytes, m.count, m.dtype, m.op or "none", -1 if m.root is None else m.root, name]
        line += [microseconds(t) for t in (m.median, m.p10, m.p90, m.p99)]
        line += [f"{m.algbw / 1e9:.2f}", f"{m.busbw / 1e9:.2f}", wrong, against.get(m.buffers, "") if ours else ""]
        if cached and cached is not m:
            line += [microseconds(cached.median), f"{cached.busbw / 1e9:.2f}"]
            line += [against.get("cached", "") if ours else ""]
        lines.append(cells(line + [""] * (len(COLUMNS) - len(line))).rstrip())
    return "\n".join(lines)


def shown(rows: list[Measurement]) -> list[Measurement]:
    """Leave out a variant ("openmpi/multiple") that does not differ from the usual setting of its library, unless it is
    the best peer.
    """
    usual = {(m.library, m.buffers): m for m in rows}
    best = [ratio.best for ratio in ratios(rows)]

    def differs(m: Measurement) -> bool:
        base = usual.get((m.library.partition("/")[0], m.buffers))
        return base is None or base is m or m in best or m.p10 > base.p90 or m.p90 < base.p10

    return [m for m in rows if differs(m)]


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


def cells(values: Iterable[object]) -> str:
    return " ".join(f"{value!s:>{width - 1}}" for value, (_, _, width) in zip(values, COLUMNS, strict=True))


def progress(share: float, what: str) -> None:
    """Draw a bar on standard error if somebody can see it; at the end take it away."""
    if not sys.stderr.isatty():
        return
    bar = "" if share >= 1 else f"[{'#' * int(30 * share):30}] {what}"[: shutil.get_terminal_size().columns - 1]
    print(f"\r\x1b[K{bar}", end="", file=sys.stderr, flush=True)


def write_json(
    path: Path,
    machine: Machine,
    plan: Plan,
    versions: dict[str, dict[str, str]],
    rows: list[Measurement],
    failures: list[Failure],
) -> None:
    document = {
        "machine": asdict(machine),
        "plan": asdict(plan),
        "versions": versions,
        "failures": [asdict(failure) for failure in failures],
    }
    lines = [json.dumps({name: rounded(value) for name, value in asdict(m).items()}) for m in rows]
    head = json.dumps(document, indent=1).removesuffix("\n}")
    text = f'{head},\n "rows": [\n' + ",\n".join(lines) + "\n ]\n}\n"  # a row a line
    files.replace(path, text.encode())


def rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value
