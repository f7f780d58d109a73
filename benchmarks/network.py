"""Measure ringcomm and Gloo between hosts, which this machine plays, beside what TCP itself can do there.

    python benchmarks/network.py                                              2 hosts, 1 rank on each, an unlimited link
    python benchmarks/network.py --ranks-per-host 2 --rates 1gbit --collectives all_reduce
    python benchmarks/network.py --hosts 4 --sizes 1K,1M,16M

Needs root, torch, a C compiler and an idle machine. The hosts are network namespaces. Round by round the libraries take
turns: ringcomm called directly, ringcomm and Gloo through torch.distributed, and link.c, which sends over one TCP
connection. Ranks are bound to cores, those of Gloo also free, and the faster counts; they sleep while another library
is measured. Where there are more ranks than cores, ringcomm is told so: a host knows its own ranks only.

All run at the priority of this process, or, with --real-time, at one that no other process interrupts. Another process,
or another thread of the same rank, that gets the core for one time slice multiplies the mean of a thousand calls of 20
µs; a library with more threads loses more.

The rows go to results/: as JSON, those of an earlier run with the same options on the same day being replaced, and as
Markdown tables.
"""

import argparse
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hosts import Host, hosts
from run import results_path

from ringcomm.bench.interrupts import Interrupted, interruptible
from ringcomm.bench.job import Job, JobFailed, Unsupported
from ringcomm.bench.machine import Machine
from ringcomm.bench.peers import LibrarySpec
from ringcomm.bench.rank.collectives import COLLECTIVES
from ringcomm.bench.report import write_json
from ringcomm.options import one_of, parse_bytes, positive, readable, several, whole

MEASURED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
DIRECT, OURS, GLOO, FREE = "ringcomm", "ringcomm through torch", "Gloo through torch", "Gloo, not bound"
MODULES = {DIRECT: "ringcomm", OURS: "torch_backend", GLOO: "gloo", FREE: "gloo"}  # of ringcomm/bench/rank
SIZES = "4,1K,64K,1M,16M,64M"
WARMUPS = 5
UNTIMED = 50  # most calls at the start of a round: the ranks have slept, and others were in the caches
LEAST_CALLS, MOST_CALLS = 3, 3000
LINK_SECONDS = 0.05
TIMEOUT = 120.0  # seconds that a round may take
RATE = re.compile(r"(\d+\.?\d*)([gm])bit")  # as tc reads it

Row = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    hosts: int
    ranks_per_host: int
    rates: tuple[str | None, ...]  # of the links
    real_time: bool

    def __str__(self) -> str:
        ranks = f"{self.ranks_per_host} rank{'s' * (self.ranks_per_host > 1)} on each"
        priority = ", real-time priority" * self.real_time
        rates = [rate or "unlimited" for rate in self.rates]
        links = f"{rates[0]} link" if len(rates) == 1 else f"links of {', '.join(rates)}"
        return f"{self.hosts} hosts, {ranks}, {links}{priority}"


class Link:
    """Runs link.c between the first two hosts."""

    def __init__(self, on: list[Host], folder: str) -> None:
        self.hosts, self.program = on[:2], f"{folder}/link"
        subprocess.run(["cc", "-O2", "-o", self.program, Path(__file__).with_name("link.c")], check=True)

    def measure(self, size: int) -> list[float]:
        """Return the seconds in which a message of 4 bytes arrives, and those to exchange `size` bytes."""
        words = [self.hosts[0].addresses[0], str(LINK_SECONDS), str(size)]
        core = sorted(os.sched_getaffinity(0))
        commands = [
            [*host.enter, "taskset", "-c", str(core[i % len(core)]), self.program, str(i), *words]
            for i, host in enumerate(self.hosts)
        ]
        with subprocess.Popen(commands[1]) as other:
            ended = subprocess.run(commands[0], stdout=subprocess.PIPE, text=True, check=True)
        if other.returncode:
            raise OSError(f"link.c ended with status {other.returncode}")
        return [float(line) for line in ended.stdout.split()]


@dataclass
class Case:
    """One collective at one size, and what its rounds have found."""

    collective: str
    count: int  # elements of a block
    bytes: int  # of the larger of input and output
    needed: int  # bytes that have to leave a host

    @classmethod
    def of(cls, collective: str, size: int, setup: Setup) -> "Case":
        row = COLLECTIVES[collective]
        blocks = row.blocks(setup.hosts * setup.ranks_per_host)
        count = max(1, size // blocks // 4)
        return cls(collective, count, 4 * count * blocks, int(4 * count * blocks * row.bus_factor(setup.hosts)))

    def prepare(self, job: Job, seconds: float) -> int:
        """Return the number of calls that take so many seconds."""
        in_place = COLLECTIVES[self.collective].in_place
        options = {"count": self.count, "dtype": "float32", "op": "sum", "root": 0, "in_place": in_place}
        job.request("prepare", self.collective, options | {"pool": 0, "memory": "private", "asynchronous": False})
        calls = WARMUPS
        for share in (0.2, 1.0):  # the first calls take many times as long as the others
            each = max(job.request("round", False, min(UNTIMED, calls), calls))
            calls = min(MOST_CALLS, max(LEAST_CALLS, round(share * seconds / each)))
        return calls


def measure(case: Case, jobs: dict[str, Job], link: Link, on: list[Host], rounds: int, seconds: float) -> list[Row]:
    """Return a row for each library."""
    calls = {name: case.prepare(job, seconds) for name, job in jobs.items()}
    found: dict[str, list[Round]] = {name: [] for name in jobs}
    links = []
    for _ in range(rounds):
        links.append(link.measure(case.needed))
        for name, job in jobs.items():
            found[name].append(one_round(job, calls[name], on))
    latency, exchange = (min(each) for each in zip(*links, strict=True))  # a limit: the best round
    rows = []
    for name, job in jobs.items():
        row: Row = {"library": name, "collective": case.collective, "bytes": case.bytes, "calls": calls[name]}
        row |= {"rounds": [each.seconds for each in found[name]]}
        row |= {what: median(each) for what, each in zip(Round._fields, zip(*found[name], strict=True), strict=True)}
        rows.append(row | {"latency": latency, "exchange": exchange, "wrong": sum(job.request("check"))})
    return rows


class Round(NamedTuple):
    """Figures of a call."""

    seconds: float
    cpu: float  # seconds of the busiest rank
    sent: float  # bytes that left the busiest host


def one_round(job: Job, calls: int, on: list[Host]) -> Round:
    sent, cpu = [host.bytes_sent() for host in on], job.request("cpu")
    untimed = min(UNTIMED, calls // 2)
    seconds = max(job.request("round", False, untimed, calls))
    used = [after - before for before, after in zip(cpu, job.request("cpu"), strict=True)]
    left = max(host.bytes_sent() - before for host, before in zip(on, sent, strict=True))
    return Round(seconds, max(used) / (untimed + calls), left / (untimed + calls))


def start_jobs(
    setup: Setup, on: list[Host], stack: ExitStack, modules: dict[str, str], **settings: dict[str, str]
) -> dict[str, Job]:
    """Start the ranks of all libraries by `ringcomm run`, once on each host; some have variables of their own."""

    def launcher(port: int) -> Callable[[int], list[str]]:
        def command(node: int) -> str:
            nodes = [f"--nnodes={setup.hosts}", f"--node-rank={node}", f"--master-addr={on[0].addresses[0]}"]
            run = [sys.executable, "-m", "ringcomm", "run", *nodes, f"--master-port={port}"]
            addresses = f"RINGCOMM_HOST_ADDRESS={','.join(on[node].addresses)}"
            return shlex.join([*on[node].enter, "env", addresses, *run, "--bind=none", "-n", str(setup.ranks_per_host)])

        # That of node 0 ends with the benchmark; the others end with it.
        others = [f'{command(node)} -- "$@" &' for node in range(1, setup.hosts)]
        return lambda _: ["sh", "-c", " ".join([*others, f'exec {command(0)} -- "$@"']), "sh"]

    size = setup.hosts * setup.ranks_per_host
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    if size > len(os.sched_getaffinity(0)):
        environment["RINGCOMM_OVERSUBSCRIBED"] = "1"
    if all(setup.rates):  # as an interface would say, and veth does not
        environment["RINGCOMM_LINK_BANDWIDTH"] = str(sum(map(gigabytes, filter(None, setup.rates))))
    jobs = {}
    for i, (name, module) in enumerate(modules.items()):
        start, own = launcher(29500 + i), environment | settings.get(name, {})
        library = LibrarySpec(name, module, sys.executable, start, "RINGCOMM_RANK", own, bound=name != FREE)
        folder = stack.enter_context(TemporaryDirectory(prefix="ringcomm-bench-", ignore_cleanup_errors=True))
        jobs[name] = Job(library, size, Path(folder), TIMEOUT)
        stack.callback(jobs[name].kill)
    return jobs


def tables(rows: list[Row]) -> str:
    """Return a Markdown table for each setup and commit."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["setup"], row["commit"]), []).append(row)
    lines = []
    for (setup, commit), mine in found.items():
        latency = median(row["latency"] for row in mine)
        head = ["", "S", *(f"µs: {name}" for name in MODULES), "link", "Gloo / ringcomm", "of the link"]
        head += ["CPU µs: ringcomm / Gloo", "leaves a host, in S: ringcomm / Gloo"]
        lines += ["", f"{setup}; commit {commit}; 4 bytes arrive after {latency * 1e6:.1f} µs.", ""]
        lines += [line(head), "|---" * len(head) + "|"]
        cases = dict.fromkeys((row["collective"], row["bytes"]) for row in mine)
        for collective, size in cases:
            case = {row["library"]: row for row in mine if (row["collective"], row["bytes"]) == (collective, size)}
            ours, gloo = case[OURS], min(case[GLOO], case[FREE], key=lambda row: row["seconds"])
            cells = [collective, readable(size), *(micro(case[name]["seconds"]) for name in MODULES)]
            cells += [micro(ours["exchange"]), f"**{gloo['seconds'] / ours['seconds']:.2f}**"]
            cells += [f"{ours['exchange'] / ours['seconds']:.0%}"]
            cells += [f"{micro(ours['cpu'])} / {micro(gloo['cpu'])}"]
            cells += [f"{ours['sent'] / size:.3g} / {gloo['sent'] / size:.3g}"]
            lines.append(line(cells))
    return "\n".join(lines[1:])


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}" if seconds < 1e-3 else f"{seconds * 1e6:,.0f}"


def keep(machine: Machine, new: list[Row]) -> None:
    """Write the rows in the place of those that they replace, and the tables of all."""
    path = results_path("-network.json")
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    what = ("setup", "collective", "bytes", "library")
    rows = {tuple(row[each] for each in what): row for row in [*old, *new]}
    write_json(path, {"machine": asdict(machine), "rows": list(rows.values())})
    title = f"{machine.cpu}, {machine.cores} cores; {machine.system}; Python {machine.python}; {machine.date[:10]}."
    path.with_suffix(".md").write_text(f"{title}\n\n{tables(list(rows.values()))}\n")


def rates_of(text: str) -> list[str | None]:
    rates = text.split(",")
    for rate in rates:
        if rate != "0" and not RATE.fullmatch(rate):
            raise argparse.ArgumentTypeError(f"expected rates such as 1gbit, 500mbit or 0, got {rate!r}")
    return [None if rate == "0" else rate for rate in rates]


def gigabytes(rate: str) -> float:
    """Return the GB/s of a rate."""
    found = RATE.fullmatch(rate)
    assert found
    return float(found[1]) / {"g": 8, "m": 8e3}[found[2]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", type=whole(2), default=2, help="default: 2")
    add("--ranks-per-host", type=whole(1), default=1, help="default: 1")
    text = "of each host's links, such as 1gbit,1gbit for two of them; 0: unlimited (default: 0)"
    add("--rates", type=rates_of, default="0", help=text)
    add("--real-time", action="store_true", help="run at a real-time priority")
    add("--sizes", type=several(parse_bytes), default=SIZES, help=f"default: {SIZES}")
    add("--collectives", type=several(one_of("collective", MEASURED)), default=",".join(MEASURED), help="default: all")
    add("--rounds", type=whole(1), default=5, help="default: 5")
    add("--seconds", type=positive, default="0.2", help="of a round (default: 0.2)")
    arguments = parser.parse_args()
    rates = tuple(arguments.rates)
    setup = Setup(arguments.hosts, arguments.ranks_per_host, rates, arguments.real_time)
    machine, rows, status = Machine.here(), list[Row](), 0
    os.environ["RINGCOMM_JOB_SECRET"] = secrets.token_hex(32)
    if setup.real_time:  # also of all that this process starts
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        with interruptible(), ExitStack() as stack:
            on = stack.enter_context(hosts(setup.hosts, setup.rates))
            link = Link(on, stack.enter_context(TemporaryDirectory()))
            jobs = start_jobs(setup, on, stack, MODULES)
            for collective in arguments.collectives:
                for size in arguments.sizes:
                    case = Case.of(collective, size, setup)
                    case_rows = measure(case, jobs, link, on, arguments.rounds, arguments.seconds)
                    rows += [{"setup": str(setup), "commit": machine.commit, **row} for row in case_rows]
                    print(tables(rows[-len(jobs) :]).splitlines()[4], flush=True)
            for job in jobs.values():
                job.close()
    except Interrupted as interrupt:
        status = interrupt.status
    except (JobFailed, Unsupported, OSError) as failure:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
        status = 1
    for row in rows:
        if row["wrong"]:
            print(f"{row['library']}: wrong elements in {row['collective']} of {row['bytes']} bytes", file=sys.stderr)
            status = 1
    if rows:
        print(tables(rows))
        keep(machine, rows)
    return status


if __name__ == "__main__":
    sys.exit(main())
