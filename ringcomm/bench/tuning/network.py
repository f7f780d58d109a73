"""`ringcomm tune --network`: measure latency and bandwidth between the hosts of this job, and keep them.

For each two kinds of machines the hosts form pairs, and all ranks of both hosts exchange messages at once, as in a
collective. The slowest pair counts.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import combinations_with_replacement
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import ringcomm
from ringcomm import ArgumentError, Communicator, RingcommError
from ringcomm.bench.machine import Machine
from ringcomm.bench.world import ERROR, hosts_of
from ringcomm.machine import tuning

__all__ = ["fastest_flows", "measure", "pairs_by_kinds", "tune_network"]

STREAMS = (1 << 20, 8 << 20, 64 << 20)  # bytes; the algorithms differ most below the first
FLOWS = (2, 4, 8)  # at each address: what is tried beside one
FASTER = 0.9  # of the time of a byte, or more flows are not worth it
CLEAR = 4  # latencies that a stream takes at least: the bandwidth is told from what is left of it
ROUND_SECONDS = 0.01
LEAST_CALLS, MOST_CALLS = 5, 500  # of a round

Kinds = tuple[str, str]
Cost = tuple[float, float]  # seconds of latency, seconds per byte
HostPairs = list[list[tuple[int, int]]]  # for each pair of hosts the pairs of their ranks


def tune_network(comm: Communicator, path: Path, rounds: int) -> int:
    """Measure; on rank 0 print and write what `ringcomm.init` then uses between such hosts. Return the exit status."""
    pairs = pairs_by_kinds(hosts_of(comm), comm.all_gather_object(tuning.machine_name()))
    if not pairs:
        text = "expected ranks on several hosts: start it by ringcomm run --nnodes, torchrun, mpirun or srun"
        raise ArgumentError(f"--network: {text}")
    facts = {"date": Machine.here().date, "ringcomm": ringcomm.__version__}
    link = comm._router.name.rpartition("+")[2]  # of shm+mpi: mpi
    costs = {}
    for kinds, between in pairs.items():
        cost = measure(comm, between, rounds)
        if cost is None:
            if comm.rank > 0:
                return ERROR
            text = f"{STREAMS[-1] >> 20} MiB take hardly longer than one byte between {' and '.join(kinds)}"
            raise RingcommError(f"the machines are too busy to measure their network: {text}; {path} is unchanged")
        costs[kinds] = cost
    transport: Any = comm._transport  # between hosts
    flows = fastest_flows(transport.use_flows, lambda kinds: measure(comm, pairs[kinds], rounds), costs)
    found = {}
    for kinds, (latency, byte_time) in costs.items():
        settings = {"link_latency": rounded(latency * 1e6), "link_bandwidth": rounded(1e-9 / byte_time)}
        if flows[kinds] > 1:
            settings[tuning.FLOWS] = flows[kinds]
        name = tuning.link_name(kinds, link)
        if comm.rank == 0:
            print(f"{name}: {settings['link_latency']:g} µs, {settings['link_bandwidth']:g} GB/s", flush=True)
            if flows[kinds] > 1:
                print(f"{name}: {flows[kinds]} flows at each address", flush=True)
        found[name] = settings, facts | {"pairs of hosts": len(pairs[kinds])}
    if comm.rank == 0:
        for name, entry in found.items():
            tuning.write(path, *entry, name)
        print(f"written to {path}; delete it to return to the built-in values")
    return 0


def fastest_flows(
    use_flows: Callable[[int], bool], measured: Callable[[Kinds], Cost | None], costs: dict[Kinds, Cost]
) -> dict[Kinds, int]:
    """Return how many flows are worth it between each two kinds of machines, and put the seconds per byte into `costs`.

    `costs` are those of one connection. All kinds are measured by one number of flows, since there are never fewer.
    """
    flows = dict.fromkeys(costs, 1)
    for more in FLOWS:
        if not use_flows(more):
            break
        found = {kinds: measured(kinds) for kinds in costs}
        faster = {kinds: cost for kinds, cost in found.items() if cost and cost[1] <= FASTER * costs[kinds][1]}
        if not faster:
            break
        for kinds, (_, byte_time) in faster.items():
            flows[kinds], costs[kinds] = more, (costs[kinds][0], byte_time)
    return flows


def pairs_by_kinds(hosts: list[tuple[str, str | None]], machines: list[str]) -> dict[Kinds, HostPairs]:
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


def measure(comm: Communicator, between: HostPairs, rounds: int) -> Cost | None:
    """Return the seconds of latency, and the seconds per byte of a host's link.

    On busy machines a latency may be a large part of a stream: then a longer one is measured. None: even the longest
    one does not tell the bandwidth.
    """
    pairs = [(pair, len(pairs)) for pairs in between for pair in pairs]
    number, rails = next(((i, rails) for i, (pair, rails) in enumerate(pairs) if comm.rank in pair), (None, 1))
    with comm.split(number) or nullcontext() as pair:
        for size in STREAMS:
            latency, stream = exchange_seconds(comm, pair, (1, size), rounds)
            byte_time = (stream - 2 * latency) / size / rails  # before a large exchange the ranks agree on it
            found = comm.all_gather_object((latency, stream, byte_time))
            if all(stream >= CLEAR * latency for latency, stream, _ in found):
                latencies, _, byte_times = zip(*found, strict=True)
                return max(latencies), max(byte_times)
    return None


def exchange_seconds(
    comm: Communicator, pair: Communicator | None, sizes: Sequence[int], rounds: int
) -> tuple[float, ...]:
    """Return the seconds in which the ranks of a pair send each other so many bytes; 0 for a rank without one.

    An all_gather of two ranks is one step of an algorithm between hosts. The sizes take turns, so that all see the same
    state of the machines, and the least of the rounds counts, since other programs only add time.
    """
    blocks = [np.ones((2, size), np.uint8) for size in sizes]
    own = [block[pair.rank if pair else 0] for block in blocks]

    def exchange(i: int, calls: int) -> float:
        comm.barrier()
        start = perf_counter()
        if pair:
            for _ in range(calls):
                pair.all_gather(own[i], blocks[i])
        return (perf_counter() - start) / calls

    def calls_of_round(i: int) -> int:
        exchange(i, LEAST_CALLS)
        first: float = max(comm.all_gather_object(exchange(i, LEAST_CALLS)))
        return max(LEAST_CALLS, min(MOST_CALLS, round(ROUND_SECONDS / first)))

    calls = [calls_of_round(i) for i in range(len(sizes))]
    seconds = [[exchange(i, calls[i]) for i in range(len(sizes))] for _ in range(rounds)]
    if not pair:
        return (0.0,) * len(sizes)
    # A rank that begins a round late finds what the other has sent: the earlier one has seen how long it took.
    of_both = np.max(pair.all_gather_object(seconds), axis=0)
    return tuple(of_both.min(axis=0).tolist())


def rounded(value: float) -> float:
    return float(f"{value:.3g}")
