"""`ringcomm bench`: measure collectives of ringcomm, alone or beside its peers."""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from pathlib import Path

from ringcomm import ArgumentError, Communicator, RingcommError
from ringcomm.bench import peers, report
from ringcomm.bench.comparison import OURS, Comparison, compare
from ringcomm.bench.interrupts import Interrupted, interruptible
from ringcomm.bench.machine import Machine, line_seconds
from ringcomm.bench.rank.collectives import COLLECTIVES, REDUCTIONS, dtype_named
from ringcomm.bench.starts import Starts
from ringcomm.bench.sweep import Sweep
from ringcomm.bench.world import World, find_world, let_rank_0_speak, run_on_ranks
from ringcomm.machine import files
from ringcomm.options import one_of, parse_bytes, several, whole
from ringcomm.types import DTYPES

__all__ = ["add_arguments", "run"]

Comparing = Callable[[int], AbstractContextManager[Comparison]]  # of so many ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    let_rank_0_speak(parser)
    collective, peer = one_of("collective", [*COLLECTIVES, "all"]), one_of("peer", [*peers.PEERS, "nccl"])
    add("collectives", nargs="*", type=collective, metavar="COLLECTIVE", help=f"{', '.join(COLLECTIVES)}, or all")
    add("--vs", type=several(peer), default=[], metavar="PEERS", help="compare with gloo,openmpi,mpich,nccl")
    add("--setup-peers", action="store_true", help="install the peers of --vs (default: all) in the cache folder first")
    add("--ranks", type=several(whole(1)), metavar="N,...", help="numbers of ranks to start (default: 2)")
    add("-b", "--begin", type=parse_bytes, default="4", metavar="BYTES", help="first size (default: 4)")
    add("-e", "--end", type=parse_bytes, default=0, metavar="BYTES", help="last size (default: 256M; emulated: 64K)")
    add("-f", "--factor", type=whole(2), default=4, help="ratio of each size to the one before (default: 4)")
    add("-n", "--iters", dest="rounds", type=whole(1), default=20, help="timed rounds per library (default: 20)")
    add("-w", "--warmups", type=whole(0), default=20, help="untimed calls first (default: 20)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="verify every element (default: 1)")
    add("--dtype", dest="dtypes", type=several(dtype), default="float32", metavar="TYPE,...", help="default: float32")
    ops, op = f"{', '.join(REDUCTIONS)} (default: sum)", one_of("operation", REDUCTIONS)
    add("--op", dest="ops", type=several(op), default="sum", metavar="OP,...", help=ops)
    add("--root", type=whole(0), default=0, help="root of rooted collectives (default: 0)")
    add("--out-of-place", dest="in_place", action="store_false", help="where the collective allows it")
    add("--device", choices=("host", "cuda", "emulated"), default="host", help="memory of the buffers (default: host)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--symmetric", action="store_true", help="ringcomm uses buffers of comm.empty()")
    form.add_argument("--shared-arrays", action="store_true", help="ringcomm uses arrays of comm.shared_arrays()")
    add("--async", dest="asynchronous", action="store_true", help="start each call asynchronously, then wait for it")
    add("--unbound", action="store_true", help="nobody binds ranks to cores: time the first calls of -n fresh starts")
    add("--noise", action="store_true", help="disturb every core: a burst of work in every 16 ms")
    add("--timeout", type=whole(1), default=60, metavar="SECONDS", help="stop a library that hangs (default: 60)")
    add("--json", type=Path, metavar="FILE", help="also write the results to FILE")


def dtype(text: str) -> str:
    name = one_of("dtype", DTYPES)(text)
    try:
        dtype_named(name)
    except TypeError:
        raise argparse.ArgumentTypeError(f"{name} needs: pip install ml_dtypes") from None
    return name


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark. Return 0; 1 if ringcomm failed or has wrong elements; 128 + the signal after an interrupt."""
    try:
        with interruptible():
            if find_world():
                return run_on_ranks(lambda comm: _measure_world(comm, arguments), arguments.timeout)
            return _start_ranks(arguments)
    except Interrupted as interrupt:
        kept = "; completed measurements are kept" if arguments.json else ""
        print(f"ringcomm bench: interrupted{kept}", file=sys.stderr)
        return interrupt.status


def _start_ranks(arguments: argparse.Namespace) -> int:
    """Measure on ranks that each library's own launcher starts on this machine."""
    names = arguments.vs
    if arguments.setup_peers:
        failed = peers.set_up(names or peers.PEERS)
        if not arguments.collectives:
            return int(bool(failed))
    sweep = sweep_of(arguments)
    libraries, missing = peers.libraries(names, sweep.device)
    for line in missing:
        print(f"ringcomm bench: {line}", file=sys.stderr)
    if names and len(libraries) == 1:
        raise RingcommError("--vs: none of these peers can be measured")
    sweep.require(len(libraries))
    kind = Starts if sweep.unbound else Comparison

    def started(ranks: int) -> AbstractContextManager[Comparison]:
        return compare(kind.here(sweep, ranks), libraries, arguments.timeout)

    return int(_compare(sweep, arguments.json, started))


def _measure_world(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Measure on the ranks of this world. Rank 0 returns the status for all."""
    world = World(comm, arguments.device, arguments.timeout)
    if comm.rank > 0:
        world.serve()
        return 0
    for option, given in (
        *(("--ranks", arguments.ranks), ("--setup-peers", arguments.setup_peers)),
        *(("--unbound", arguments.unbound), ("--noise", arguments.noise)),
        ("--vs", {*arguments.vs} - {*world.libraries}),
    ):
        if given:
            here = f"{world.launcher} has started {comm.size} ranks, and {' and '.join(world.libraries)} run on them"
            raise ArgumentError(f"{option}: for ranks that bench starts itself, without a launcher; {here}")
    sweep = sweep_of(arguments, comm.size)
    sweep.require(len(world.libraries), world.here)
    return int(_compare(sweep, arguments.json, lambda _: world.compare(sweep)))


def sweep_of(arguments: argparse.Namespace, size: int = 2) -> Sweep:
    """Return the sweep, by default for `size` ranks."""
    if not arguments.collectives:
        raise ArgumentError(f"which collective? {', '.join(COLLECTIVES)}, or all")
    if arguments.json:
        files.check_writable(arguments.json)  # before minutes of measuring
    given = {field.name: getattr(arguments, field.name) for field in fields(Sweep)}
    return Sweep(**given | {"ranks": arguments.ranks or [size]})


def _compare(sweep: Sweep, json: Path | None, comparing: Comparing) -> bool:
    """Measure and print; return whether ringcomm failed or has wrong elements."""
    results = report.Results(Machine.here(), sweep)
    try:
        for ranks in sweep.ranks:
            with comparing(ranks) as comparison:
                _measure(comparison, results)
    finally:  # also after an interrupt
        if json and (results.rows or results.failures):
            report.write_json(json, asdict(results))
    wrong = [m for m in results.rows if m.wrong]
    for m in wrong:
        what = f"{m.wrong} wrong elements in {m.collective} of {m.bytes} bytes of {m.dtype}"
        print(f"ringcomm bench: {m.library}: {what}", file=sys.stderr)
    return OURS in [m.library for m in wrong] + [failure.library for failure in results.failures]


def _measure(comparison: Comparison, results: report.Results) -> None:
    """Measure on one number of ranks, and print the rows as they come."""
    results.versions |= {job.name: job.versions for job in comparison.jobs}
    results.placement[comparison.ranks] = comparison.placement
    print(report.header(results.machine, comparison), flush=True)
    _report_failures(comparison, results)
    last, copies = "", []
    for rows in comparison.measure():
        if rows and len(comparison.sweep.collectives) > 1 and rows[0].collective != last:
            last = rows[0].collective
            print(f"# {last}")
        if rows:
            results.rows += rows
            results.lines += [line_seconds()] if comparison.cores else []
            copies += [m.memcpy / 1e9 for m in rows if m.memcpy]
            print((report.starts_text if comparison.sweep.unbound else report.rows_text)(rows), flush=True)
        for failure in comparison.missing:
            print(report.missing_text(failure, rows), flush=True)
        _report_failures(comparison, results)
    if copies:
        per = "core" if comparison.cores else "rank"
        print(f"# memcpy of 256 MiB, all ranks at once: {min(copies):.1f} to {max(copies):.1f} GB/s per {per}")
    if results.lines:
        least, most = min(results.lines) * 1e9, max(results.lines) * 1e9
        print(f"# a cache line, from one core to another and back: {least:.0f} to {most:.0f} ns")


def _report_failures(comparison: Comparison, results: report.Results) -> None:
    for failure in comparison.failures:
        where = f" in {failure.collective} of {failure.bytes} bytes" if failure.collective else ""
        print(f"ringcomm bench: {failure.library}{where}: {failure.reason}", file=sys.stderr, flush=True)
    results.failures += comparison.failures
    comparison.failures.clear()
