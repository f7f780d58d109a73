"""`ringcomm bench`: measure collectives of ringcomm, alone or beside its peers."""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

from ringcomm import ArgumentError
from ringcomm.bench import peers, report, virtual
from ringcomm.bench.comparison import Comparison, LibraryFailure, Measurement
from ringcomm.bench.interrupts import Interrupted, deferred_signals, interruptible
from ringcomm.bench.machine import Machine
from ringcomm.bench.plan import BenchPlan, parse_bytes, parse_dtypes, parse_ops, parse_ranks, positive, whole
from ringcomm.bench.rank.collectives import COLLECTIVES, REDUCTIONS
from ringcomm.machine import files

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("collectives", nargs="*", metavar="COLLECTIVE", help=f"{', '.join(COLLECTIVES)}, or all")
    add("--vs", default="", metavar="PEERS", help="libraries to compare with: gloo,openmpi,mpich,nccl")
    add("--setup-peers", action="store_true", help="install the peers of --vs (default: all) in the cache folder first")
    add("--ranks", type=parse_ranks, default="2", metavar="N,...", help="numbers of ranks (default: 2)")
    add("-b", "--begin", type=parse_bytes, default="4", metavar="BYTES", help="first size (default: 4)")
    add("-e", "--end", type=parse_bytes, default=0, metavar="BYTES", help="last size (default: 256M; emulated: 64K)")
    add("-f", "--factor", type=whole(2), default=4, help="ratio of each size to the one before (default: 4)")
    add("-n", "--iters", dest="rounds", type=whole(1), default=20, help="timed rounds per library (default: 20)")
    add("-w", "--warmups", type=whole(0), default=20, help="untimed calls first (default: 20)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="verify every element (default: 1)")
    add("--dtype", dest="dtypes", type=parse_dtypes, default="float32", metavar="TYPE,...", help="default: float32")
    ops = f"{', '.join(REDUCTIONS)} (default: sum)"
    add("--op", dest="ops", type=parse_ops, default="sum", metavar="OP,...", help=ops)
    add("--root", type=whole(0), default=0, help="root of rooted collectives (default: 0)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--in-place", action="store_true", default=True, help="where the collective allows it (default)")
    form.add_argument("--out-of-place", dest="in_place", action="store_false", help="where the collective allows it")
    add("--device", choices=("host", "cuda", "emulated"), default="host", help="memory of the buffers (default: host)")
    add("--virtual-ranks", action="store_true", help="all ranks in one kernel launch on one GPU: the kernel alone")
    add("--symmetric", action="store_true", help="ringcomm uses buffers of comm.empty()")
    add("--async", dest="asynchronous", action="store_true", help="start each call asynchronously, then wait for it")
    add("--timeout", type=whole(1), default=60, metavar="SECONDS", help="stop a library that hangs (default: 60)")
    add("--min-speedup", type=positive, metavar="X", help="fail if ringcomm is not X times as fast as the best peer")
    add("--json", type=Path, metavar="FILE", help="also write the results to FILE")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark. Return 0; 1 for wrong elements, a failure of ringcomm, or a speedup below --min-speedup;
    128 + the signal after an interrupt.
    """
    names = peers.parse_names(arguments.vs)
    if arguments.setup_peers:
        failed = peers.set_up(names or peers.PEERS)
        if not arguments.collectives:
            return int(bool(failed))
    if not arguments.collectives:
        raise ArgumentError(f"which collective? {', '.join(COLLECTIVES)}, or all")
    if arguments.min_speedup is not None and not names:
        raise ArgumentError("--min-speedup needs peers: expected --vs")
    plan = plan_of(arguments)
    if arguments.virtual_ranks and (names or arguments.symmetric or arguments.asynchronous):
        raise ArgumentError("--virtual-ranks: expected neither --vs, --symmetric nor --async")
    if arguments.json:
        files.check_writable(arguments.json)  # before minutes of measuring
    try:
        with interruptible():
            if arguments.virtual_ranks:
                return int(virtual.run(plan, arguments.json))
            return int(_compare(plan, names, arguments))
    except Interrupted as interrupt:
        print("ringcomm bench: interrupted; completed measurements are kept", file=sys.stderr)
        return interrupt.status


def plan_of(arguments: argparse.Namespace) -> BenchPlan:
    return BenchPlan(**{field.name: getattr(arguments, field.name) for field in fields(BenchPlan)})


def _compare(plan: BenchPlan, names: list[str], arguments: argparse.Namespace) -> bool:
    """Measure and print; return whether the benchmark failed."""
    libraries, missing = peers.libraries(names, plan.device)
    plan.require(len(libraries))
    for line in missing:
        print(f"ringcomm bench: {line}", file=sys.stderr)
    results = Results(plan, Machine.here(), arguments.timeout)
    try:
        for ranks in plan.ranks:
            results.measure(ranks, libraries)
    finally:  # also after an interrupt
        report.progress(1, "")
        if arguments.json and (results.rows or results.failures):
            with deferred_signals():
                report.write_json(
                    arguments.json, results.machine, plan, results.versions, results.rows, results.failures
                )
    least = arguments.min_speedup
    return results.failed() or (least is not None and results.too_slow(least, names))


class Results:
    """The rows and failures so far, printed as they come."""

    def __init__(self, plan: BenchPlan, machine: Machine, timeout: float) -> None:
        self.plan = plan
        self.machine = machine
        self.timeout = timeout
        self.versions: dict[str, dict[str, str]] = {}
        self.rows: list[Measurement] = []
        self.failures: list[LibraryFailure] = []

    def measure(self, ranks: int, libraries: list[peers.LibrarySpec]) -> None:
        with ExitStack() as stack:
            comparison = Comparison(self.plan, ranks, self.timeout, report.progress)
            comparison.start(libraries, stack)
            self.versions |= comparison.versions
            report.progress(1, "")
            print(report.header(self.machine, self.plan, ranks, comparison.versions), flush=True)
            self.print_failures(comparison)
            last = ""
            for rows in comparison.measure():
                report.progress(1, "")
                if rows and len(self.plan.collectives) > 1 and rows[0].collective != last:
                    last = rows[0].collective
                    print(f"# {last}")
                if rows:
                    self.rows += rows
                    print(report.rows_text(rows), flush=True)
                self.print_failures(comparison)
            copies = [m.memcpy / 1e9 for m in self.rows if m.ranks == ranks and m.memcpy]
            if copies:
                per = "rank" if self.plan.device == "cuda" else "core"
                print(f"# memcpy of 256 MiB, all ranks at once: {min(copies):.1f} to {max(copies):.1f} GB/s per {per}")
            comparison.close()

    def print_failures(self, comparison: Comparison) -> None:
        for failure in comparison.failures:
            where = f" in {failure.collective} of {failure.bytes} bytes" if failure.collective else ""
            print(f"ringcomm bench: {failure.library}{where}: {failure.reason}", file=sys.stderr, flush=True)
        self.failures += comparison.failures
        comparison.failures = []

    def failed(self) -> bool:
        """Print the wrong elements of every library; return whether ringcomm has any, or failed."""
        wrong = [m for m in self.rows if m.wrong]
        for m in wrong:
            what = f"{m.wrong} wrong elements in {m.collective} of {m.bytes} bytes of {m.dtype}"
            print(f"ringcomm bench: {m.library}: {what}", file=sys.stderr)
        return "ringcomm" in [m.library for m in wrong] + [failure.library for failure in self.failures]

    def too_slow(self, least: float, names: list[str]) -> bool:
        """Print where the speedup is below `least`, and which peers of `names` have none; return whether any."""
        found = [f"below {least:g} x: {speedup}" for speedup in report.speedups(self.rows) if speedup.value < least]
        measured = {m.library.partition("/")[0] for m in self.rows}
        found += [f"no speedup over {name}: it was not measured" for name in names if name not in measured]
        found += [f"{failure.library} failed" for failure in self.failures if failure.library != "ringcomm"]
        for line in found:
            print(f"ringcomm bench: {line}", file=sys.stderr)
        return bool(found)
