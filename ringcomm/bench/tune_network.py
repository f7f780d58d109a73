"""`ringcomm tune --network`: measure latency and bandwidth between the hosts of this job, and keep them.

For each two kinds of machines the hosts form pairs, and all ranks of both hosts exchange messages at once, as in a
collective. The slowest pair counts.
"""

from collections import defaultdict
from itertools import combinations_with_replacement
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import ringcomm
from ringcomm import ArgumentError, Communicator
from ringcomm.bench.machine import Machine
from ringcomm.bench.world import hosts_of
from ringcomm.machine import tuning

__all__ = ["pairs_by_kinds", "tune_network"]

STREAM = 1 << 20  # bytes; the algorithms differ most below
ROUND_SECONDS = 0.01
MOST_CALLS = 500  # of a round

HostPairs = list[list[tuple[int, int]]]  # for each pair of hosts the pairs of their ranks


def tune_network(comm: Communicator, path: Path, rounds: int) -> int:
    """Measure; on rank 0 print and write what `ringcomm.init` then uses between such hosts. Return the exit status."""
    pairs = pairs_by_kinds(hosts_of(comm), comm.all_gather_object(tuning.machine_name()))
    if not pairs:
        text = "expected ranks on several hosts: start it by ringcomm run --nnodes, torchrun, mpirun or srun"
        raise ArgumentError(f"--network: {text}")
    facts = {"date": Machine.here().date, "ringcomm": ringcomm.__version__}
    link = comm._transport.name.rpartition("+")[2]  # of shm+mpi: mpi
    found = {}
    for kinds, between in pairs.items():
        latency, byte_time = measure(comm, between, rounds)
        settings = {"link_latency": rounded(latency * 1e6), "link_bandwidth": rounded(1e-9 / byte_time)}
        name = tuning.link_name(kinds, link)
        if comm.rank == 0:
            print(f"{name}: {settings['link_latency']:g} µs, {settings['link_bandwidth']:g} GB/s", flush=True)
        found[name] = settings, facts | {"pairs of hosts": len(between)}
    if comm.rank == 0:
        for name, entry in found.items():
            tuning.write(path, *entry, name)
        print(f"written to {path}; delete it to return to the built-in values")
    return 0


def pairs_by_kinds(hosts: list[tuple[str, str | None]], machines: list[str]) -> dict[tuple[str, str], HostPairs]:
    """Return for each two kinds of machines as many pairs of hosts as there are; given each rank's host and kind."""
    by_kind: dict[str, dict[object, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (host, machine) in enumerate(zip(hosts, machines, strict=True)):
        by_kind[machine][host].append(rank)
    found = {}
    for a, b in combinations_with_replacement(sorted(by_kind), 2):
        first, second = [*by_kind[a].values()], [*by_kind[b].values()]
        if a == b:
            first, second = first[::2], first[1::2]
        found[a, b] = [[*zip(*ranks, strict=False)] for ranks in zip(first, second, strict=False)]
    return {kinds: pairs for kinds, pairs in found.items() if pairs}


def measure(comm: Communicator, between: HostPairs, rounds: int) -> tuple[float, float]:
    """Return the seconds of latency, and the seconds per byte of a host's link."""
    pairs = [(pair, len(pairs)) for pairs in between for pair in pairs]
    number, rails = next(((i, rails) for i, (pair, rails) in enumerate(pairs) if comm.rank in pair), (None, 1))
    pair = comm.split(number)
    latency, stream = (exchange_seconds(comm, pair, size, rounds) for size in (1, STREAM))
    if pair:
        pair.close()
    byte_time = (stream - 2 * latency) / STREAM / rails  # before a large exchange the ranks agree on it
    latencies, byte_times = zip(*comm.all_gather_object((latency, byte_time)), strict=True)
    return max(latencies), max(byte_times)


def exchange_seconds(comm: Communicator, pair: Communicator | None, size: int, rounds: int) -> float:
    """Return the seconds in which the ranks of a pair send each other so many bytes; 0 for a rank without one.

    An all_gather of two ranks is one step of an algorithm between hosts.
    """
    blocks = np.ones((2, size), np.uint8)
    own = blocks[pair.rank if pair else 0]

    def exchange(calls: int) -> float:
        comm.barrier()
        start = perf_counter()
        if pair:
            for _ in range(calls):
                pair.all_gather(own, blocks)
        return (perf_counter() - start) / calls

    exchange(1)
    first = max(comm.all_gather_object(exchange(1)))
    calls = max(1, min(MOST_CALLS, round(ROUND_SECONDS / first)))
    seconds = median(exchange(calls) for _ in range(rounds))
    return seconds if pair else 0.0


def rounded(value: float) -> float:
    return float(f"{value:.3g}")
