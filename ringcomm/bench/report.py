"""What a benchmark says: a table with the columns of nccl-tests for people, JSON for machines."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import ringcomm

__all__ = ["Machine", "Measurement", "header", "progress", "row", "write_json"]

COLUMNS = (
    *(("size", "(B)"), ("count", "(elements)"), ("type", ""), ("redop", ""), ("root", "")),
    *(("time", "(us)"), ("algbw", "(GB/s)"), ("busbw", "(GB/s)"), ("#wrong", "")),
)
WIDTHS = (13, 13, 15, 7, 6, 12, 9, 9, 8)


@dataclass(frozen=True)
class Measurement:
    """One row. Seconds are those of one call on the slowest rank, over the rounds; bandwidths are bytes per second."""

    library: str
    collective: str
    bytes: int
    count: int
    dtype: str
    op: str | None
    root: int | None
    seconds_median: float
    seconds_p90: float
    seconds_p99: float
    algbw: float
    busbw: float
    wrong: int


@dataclass(frozen=True)
class Machine:
    """Where and when the figures were taken."""

    cpu: str
    cores: int  # that this process may use
    system: str
    versions: dict[str, str]
    date: str

    @classmethod
    def here(cls) -> Machine:
        now = datetime.datetime.now(datetime.UTC)
        return cls(
            cpu=cpu_name(),
            cores=len(os.sched_getaffinity(0)),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            versions={
                "ringcomm": ringcomm.__version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
            },
            date=now.isoformat(timespec="seconds"),
        )


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def header(machine: Machine, facts: list[str]) -> str:
    """Return the lines above the table: the machine, the given facts, the names and units of the columns."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines = [f"{machine.cpu}, {machine.cores} cores, {machine.system}", f"{versions}; {machine.date}", *facts, ""]
    columns, units = (row_text(*cells)[2:] for cells in zip(*COLUMNS, strict=True))
    return "\n".join(f"# {line}".rstrip() for line in [*lines, columns, units])


def row(m: Measurement) -> str:
    op = m.op or "none"
    root = -1 if m.root is None else m.root
    time, algbw, busbw = f"{m.seconds_median * 1e6:.2f}", f"{m.algbw / 1e9:.2f}", f"{m.busbw / 1e9:.2f}"
    return row_text(m.bytes, m.count, m.dtype, op, root, time, algbw, busbw, m.wrong)


def row_text(*cells: object) -> str:
    return "".join(f"{cell!s:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def progress(done: int, total: int, what: str) -> None:
    """Draw a bar on standard error if somebody can see it; at the end take it away."""
    if not sys.stderr.isatty():
        return
    bar = "" if done == total else f"[{'#' * (30 * done // total):30}] {what}"
    print(f"\r\x1b[K{bar}", end="", file=sys.stderr, flush=True)


def write_json(path: Path, machine: Machine, facts: dict[str, object], rows: list[Measurement]) -> None:
    document = {"machine": asdict(machine), **facts, "rows": [asdict(m) for m in rows]}
    path.write_text(json.dumps(document, indent=1) + "\n")
