"""`ringcomm bench`: measure collectives, ringcomm alone or side by side with its peers."""

import argparse
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from ringcomm import ArgumentError, files
from ringcomm.bench import peers, report, virtual
from ringcomm.bench.interrupts import Interrupted, interruptible, uninterrupted
from ringcomm.bench.machine import Machine
from ringcomm.bench.plan import Plan, parse_bytes, parse_collectives, parse_dtypes, parse_ops, positive, whole
from ringcomm.bench.rank.collectives import COLLECTIVES, REDUCTIONS
from ringcomm.bench.rounds import Failure, Lineup, Measurement

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("collectives", nargs="*", metavar="COLLECTIVE", help=f"{', '.join(COLLECTIVES)}, or all")
    add("--vs", default="", metavar="PEERS", help="compare with these: gloo,openmpi,mpich,nccl")
    add("--setup-peers", action="store_true", help="first install the peers (of --vs, else all) in a cache folder")
    add("--ranks", type=numbers, default="2", metavar="N,...", help="numbers of ranks, each a process (default: 2)")
    add("-b", "--begin", type=parse_bytes, default="4", metavar="BYTES", help="first size (default: 4)")
    add("-e", "--end", type=parse_bytes, metavar="BYTES", help="last size (default: 256M; emulated: 64K)")
    add("-f", "--factor", type=whole(2), default=4, help="from each size to the next (default: 4)")
    add("-n", "--iters", type=whole(1), default=20, metavar="ROUNDS", help="rounds of each library (default: 20)")
    add("-w", "--warmups", type=whole(0), default=20, help="calls before the clock runs (default: 20)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="verify every element (default: 1)")
    add("--dtype", type=parse_dtypes, default="float32", metavar="TYPE,...", help="default: float32")
    add("--op", type=parse_ops, default="sum", metavar="OP,...", help=f"of {', '.join(REDUCTIONS)} (default: sum)")
    add("--root", type=whole(0), default=0, help="default: 0")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--in-place", action="store_true", default=True, help="where there is such a form (default)")
    place.add_argument("--out-of-place", dest="in_place", action="store_false", help="where there is such a form")
    add(
        "--rotate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let buffers change beyond the last-level cache, with the cached figure beside it (default)",
    )
    add("--device", choices=("host", "cuda", "emulated"), default="host", help="where the buffers lie (default: host)")
    add("--virtual-ranks", action="store_true", help="the ranks share one GPU and one launch: the kernel alone")
    add("--symmetric", action="store_true", help="ringcomm's buffers from comm.empty(), which peers access directly")
    add("--async", dest="asynchronous", action="store_true", help="start each call, then wait for it")
    add("--patience", type=whole(1), default=60, metavar="SECONDS", help="after which a silent library is ended (60)")
    add("--min-ratio", type=positive, metavar="X", help="fail where ringcomm is not X times as fast as the best peer")
    add("--json", type=Path, metavar="FILE", help="write the results there as well")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark as the command line says. Return 0; 1 for wrong elements, a failure of ringcomm or a ratio
    under --min-ratio; 128 + the signal that interrupted it, 130 after Ctrl-C.
    """
    names = peers.names_of(arguments.vs)
    if arguments.setup_peers:
        failed = peers.set_up(names or peers.PEERS)
        if not arguments.collectives:
            return int(bool(failed))
    if not arguments.collectives:
        raise ArgumentError(f"which collective? {', '.join(COLLECTIVES)}, or all")
    if arguments.min_ratio is not None and not names:
        raise ArgumentError("--min-ratio compares with peers: expected --vs")
    plan = plan_of(arguments)
    if arguments.virtual_ranks and (names or arguments.symmetric or arguments.asynchronous):
        raise ArgumentError("--virtual-ranks: expected neither --vs, --symmetric nor --async")
    if arguments.json:
        files.check_writable(arguments.json)  # now, and not after minutes of measuring
    try:
        with interruptible():
            return int(
                virtual.run(plan, arguments.json) if arguments.virtual_ranks else _compare(plan, names, arguments)
            )
    except Interrupted as interrupt:
        print("ringcomm bench: interrupted: what was measured so far is kept", file=sys.stderr)
        return interrupt.status


def _compare(plan: Plan, names: list[str], arguments: argparse.Namespace) -> bool:
    contenders, missing = peers.contenders(names, plan.device)
    plan.require(len(contenders))
    for line in missing:
        print(f"ringcomm bench: {line}", file=sys.stderr)
    results = Results(plan, Machine.here(), arguments.patience)
    try:
        for ranks in plan.ranks:
            results.measure(ranks, contenders)
    finally:  # also when it is interrupted
        report.progress(1, "")
        if arguments.json and (results.rows or results.failures):
            found = results.machine, plan, results.versions, results.rows, results.failures
            with uninterrupted():
                report.write_json(arguments.json, *found)
    return results.judge() or (arguments.min_ratio is not None and results.misses(arguments.min_ratio, names))


class Results:
    """All rows, as they come."""

    def __init__(self, plan: Plan, machine: Machine, patience: float) -> None:
        self.plan = plan
        self.machine = machine
        self.patience = patience
        self.versions: dict[str, dict[str, str]] = {}
        self.rows: list[Measurement] = []
        self.failures: list[Failure] = []

    def measure(self, ranks: int, contenders: list[peers.Contender]) -> None:
        with ExitStack() as stack:
            lineup = Lineup(self.plan, ranks, self.patience, report.progress)
            lineup.start(contenders, stack)
            self.versions |= lineup.versions
            report.progress(1, "")
            print(report.header(self.machine, self.plan, ranks, lineup.versions), flush=True)
            self.tell(lineup)
            last = ""
            for rows in lineup.measure():
                report.progress(1, "")
                if rows and len(self.plan.collectives) > 1 and rows[0].collective != last:
                    last = rows[0].collective
                    print(f"# {last}")
                if rows:
                    self.rows += rows
                    print(report.rows_text(rows), flush=True)
                self.tell(lineup)
            copies = [m.memcpy for m in self.rows if m.ranks == ranks and m.memcpy]
            if copies:
                slow, fast = min(copies) / 1e9, max(copies) / 1e9
                speed = f"{slow:.1f} to {fast:.1f} GB/s per {'rank' if self.plan.device == 'cuda' else 'core'}"
                print(f"# memcpy of 256 MiB, all ranks at once: {speed} during the run")
            lineup.close()

    def tell(self, lineup: Lineup) -> None:
        """Say which libraries have failed since the last time."""
        for failure in lineup.failures:
            where = f" in {failure.collective} of {failure.bytes} bytes" if failure.collective else ""
            print(f"ringcomm bench: {failure.library}{where}: {failure.reason}", file=sys.stderr, flush=True)
        self.failures += lineup.failures
        lineup.failures = []

    def judge(self) -> bool:
        """Say what is wrong; return whether it is ringcomm's."""
        for m in self.rows:
            if m.wrong:
                what = f"{m.wrong} wrong elements in {m.collective} of {m.bytes} bytes of {m.dtype}"
                print(f"ringcomm bench: {m.library}: {what}", file=sys.stderr)
        failed = any(failure.library == "ringcomm" for failure in self.failures)
        return failed or any(m.wrong for m in self.rows if m.library == "ringcomm")

    def misses(self, least: float, names: list[str]) -> bool:
        """Say where ringcomm is not as fast as that, or could not be compared with every peer of `names`."""
        found = [f"under {least:g} x: {ratio}" for ratio in report.ratios(self.rows) if ratio.value < least]
        for name in names:
            measured = [m for m in self.rows if m.library.partition("/")[0] == name]
            if not measured:
                found.append(f"nothing to compare with: {name} was not measured")
        found += [f"{failure.library} failed" for failure in self.failures if failure.library != "ringcomm"]
        for words in found:
            print(f"ringcomm bench: {words}", file=sys.stderr)
        return bool(found)


def plan_of(arguments: argparse.Namespace) -> Plan:
    return Plan(
        collectives=parse_collectives(arguments.collectives),
        ranks=arguments.ranks,
        begin=arguments.begin,
        end=arguments.end or parse_bytes("64K" if arguments.device == "emulated" else "256M"),
        factor=arguments.factor,
        rounds=arguments.iters,
        warmups=arguments.warmups,
        check=bool(arguments.check),
        dtypes=arguments.dtype,
        ops=arguments.op,
        root=arguments.root,
        in_place=arguments.in_place,
        rotate=arguments.rotate,
        symmetric=arguments.symmetric,
        asynchronous=arguments.asynchronous,
        device=arguments.device,
    )


def numbers(text: str) -> list[int]:
    """Read 2 or 2,4,8."""
    with suppress(ValueError):
        found = [int(word) for word in text.split(",")]
        if all(number >= 1 for number in found):
            return list(dict.fromkeys(found))
    raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of ranks such as 2 or 2,4,8")
