"""A start of ranks that run already, on hosts that this machine plays: seconds of `ringcomm.init` and a barrier.

    python benchmarks/init.py 1x128 2x64 8x8          hosts x ranks on each

Needs root, and an idle machine. The hosts are network namespaces (hosts.py). A row has the slowest rank of each
repetition, and what start_cost predicts where all ranks share the cores of this machine, for a connection of each rank
to all ranks of other hosts.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time

import numpy as np
from hosts import hosts

import ringcomm
from ringcomm.bootstrap.start_cost import start_cost

REPETITIONS = 5


def start(layout: str) -> None:
    """Run this program on the ranks of each host."""
    count, local = map(int, layout.split("x"))
    environment = os.environ | {"RINGCOMM_JOB_SECRET": secrets.token_hex(32)}
    program = ["--bind=none", "-n", str(local), __file__, layout]
    run = [sys.executable, "-m", "ringcomm", "run"]
    if count == 1:
        statuses = [subprocess.run([*run, *program], check=False).returncode]
    else:
        with hosts(count) as on:
            job = [f"--nnodes={count}", f"--master-addr={on[0].addresses[0]}", "--master-port=29500"]
            commands = [[*host.enter, *run, *job, f"--node-rank={node}", *program] for node, host in enumerate(on)]
            nodes = [subprocess.Popen(command, env=environment) for command in commands]
            statuses = [node.wait() for node in nodes]
    if any(statuses):
        raise SystemExit(f"{layout}: the launchers ended with {statuses}")


def measure(layout: str) -> None:
    """On a rank: start again and again, and print the times on rank 0."""
    count, local = map(int, layout.split("x"))
    comm, times = ringcomm.init(), []
    for _ in range(REPETITIONS):
        comm.barrier()
        begin = time.perf_counter()
        with ringcomm.init() as again:
            again.barrier()
            times.append(time.perf_counter() - begin)
    slowest = comm.all_reduce(np.array(times), "max")
    if comm.rank == 0:
        server, _, rank = start_cost(count, local, connections=comm.size - local, byte_time=0)
        predicted = server + rank * max(1, comm.size / len(os.sched_getaffinity(0)))
        measured = " ".join(f"{each:.3f}" for each in sorted(slowest))
        print(f"{layout}: {measured} s; predicted {predicted:.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="+", metavar="HOSTSxRANKS")
    for layout in parser.parse_args().layouts:
        measure(layout) if "RINGCOMM_RANK" in os.environ else start(layout)


if __name__ == "__main__":
    main()
