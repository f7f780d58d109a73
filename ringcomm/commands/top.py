"""`ringcomm top`: show what the ranks of this user's jobs on this machine do."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

from ringcomm.options import positive
from ringcomm.trace.live import Rank, RunningJob, find_jobs
from ringcomm.trace.report import plural, printable
from ringcomm.trace.waiting import explain

__all__ = ["add_arguments", "run"]

CLEAR = "\x1b[H\x1b[2J"  # the screen
WIDTH = 100  # characters of a command that are shown

Counts = dict[tuple[int, int], tuple[int, int]]  # calls and bytes, by job and rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what each rank of this user's jobs on this machine is in, for how long, and for whom it waits. Jobs need "
        "no preparation. Rates are those since the last look. Ctrl-C ends it."
    )
    parser.add_argument("--once", action="store_true", help="look once, with the rates of one interval, and end")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each look")
    parser.add_argument("--interval", type=positive, default=1.0, metavar="S", help="seconds between two looks (1)")


def run(arguments: argparse.Namespace) -> int:
    counts, then = _counts(find_jobs()), time.monotonic()
    while True:
        time.sleep(arguments.interval)
        jobs, before, then = find_jobs(), then, time.monotonic()
        if arguments.json:
            print(json.dumps([asdict(job) for job in jobs]), flush=True)
        else:
            text = "\n".join(_lines(jobs, counts, then - before))
            print(CLEAR + text if sys.stdout.isatty() and not arguments.once else text, flush=True)
        if arguments.once:
            return 0
        counts = _counts(jobs)


def _counts(jobs: list[RunningJob]) -> Counts:
    return {(job.number, rank.rank): (rank.calls, rank.bytes) for job in jobs for rank in job.ranks}


def _lines(jobs: list[RunningJob], before: Counts, interval: float) -> Iterator[str]:
    if not jobs:
        yield "no jobs of this user"
    for job in jobs:
        here = len(job.ranks)
        others = f" of {job.size}, on this host" if job.size > here else ""
        yield f"{plural(here, 'rank')}{others}: {printable(job.command)[:WIDTH]}"
        yield f"{'rank':>6} {'process':>8}  {'calls/s':>9} {'GB/s':>7}  does"
        for rank in job.ranks:
            calls, moved = before.get((job.number, rank.rank), (rank.calls, rank.bytes))
            per_second = (
                max(rank.calls - calls, 0) / interval,
                max(rank.bytes - moved, 0) / interval,
            )  # a group has ended
            rates = f"{per_second[0]:>9,.0f} {per_second[1] * 1e-9:>7.2f}"
            yield f"{rank.rank:>6} {rank.pid:>8}  {rates}  {_does(rank)}"
        yield from _explain(job)
        yield ""


def _does(rank: Rank) -> str:
    parts = [] if rank.state == "runs" else [rank.state]
    if rank.call:
        parts.append(f"{rank.call} for {rank.seconds:.1f} s")
    elif rank.state in ("runs", "stopped"):
        parts.append("in no call")
    if rank.waits_for is not None:
        parts.append(f"waits for rank {rank.waits_for}")
    return ", ".join(parts)


def _explain(job: RunningJob) -> Iterator[str]:
    waits = {rank.rank: rank.waits_for for rank in job.ranks if rank.waits_for is not None}
    yield from (f"       {line}" for line in explain(waits, {rank.rank: _does(rank) for rank in job.ranks}))
