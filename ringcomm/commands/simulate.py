"""`ringcomm simulate`: predict the time of each algorithm on many machines, and the fastest one at each size."""

import argparse
from functools import lru_cache

from ringcomm import ArgumentError
from ringcomm.algorithms import ALGORITHMS, Algorithm, record
from ringcomm.algorithms.cost import CLUSTER, Cluster, LinkCost, algorithm_cost, schedule_cost
from ringcomm.algorithms.link_parameters import LINKS, link_facts, link_parameters
from ringcomm.algorithms.schedule import Lengths, even
from ringcomm.algorithms.schedule_table import ScheduleTable
from ringcomm.algorithms.select import hierarchical_cost
from ringcomm.bench.rank.collectives import COLLECTIVES
from ringcomm.config import Config
from ringcomm.options import parse_bytes, positive, sizes, whole

__all__ = ["MAX_RECORDED_RANKS", "add_arguments", "run", "seconds"]

MAX_RECORDED_RANKS = 512  # recording the schedules of more takes too long
ITEM = 4  # bytes: float32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("collective", choices=ALGORITHMS, metavar="COLLECTIVE", help=", ".join(ALGORITHMS))
    add("-n", "--ranks", type=whole(1), default=1, metavar="N", help="ranks per node (default: 1)")
    add("--nodes", type=whole(1), default=1, metavar="N", help="number of nodes (default: 1)")
    add("-b", "--begin", type=parse_bytes, default="4", metavar="BYTES", help="first size (default: 4)")
    add("-e", "--end", type=parse_bytes, default="256M", metavar="BYTES", help="last size (default: 256M)")
    add("-f", "--factor", type=whole(2), default=4, help="ratio of each size to the one before (default: 4)")
    (latency, byte_time), between, gamma, _ = CLUSTER
    for name, values, what in (
        ("--latency", (between.latency * 1e6, latency * 1e6), "µs per message between nodes, and inside a node"),
        ("--bandwidth", (1e-9 / between.byte_time, 1e-9 / byte_time), "GB/s of a node's link, and between its ranks"),
    ):
        shown = f"{values[0]:g} {values[1]:g}, or as `ringcomm tune --network` has measured between such machines"
        text = f"{what} (default: {shown})"
        add(name, type=positive, nargs=2, default=(None, values[1]), metavar=("BETWEEN", "INSIDE"), help=text)
    text = f"GB/s at which a rank reduces or copies (default: {1e-9 / gamma:g})"
    add("--reduce-bandwidth", type=positive, default=1e-9 / gamma, metavar="GB/s", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Print a table: time and bus bandwidth of each algorithm at each size."""
    collective, local, nodes = arguments.collective, arguments.ranks, arguments.nodes
    ranks = local * nodes
    if ranks < 2:
        raise ArgumentError("one rank does not communicate: expected -n or --nodes")
    (given_latency, inside), (given_bandwidth, memory) = arguments.latency, arguments.bandwidth
    (between, whence), (link, link_whence) = between_nodes(given_latency, given_bandwidth)
    work = arguments.reduce_bandwidth
    cluster = Cluster(LinkCost(inside / 1e6, 1e-9 / memory), LinkCost(between / 1e6, 1e-9 / link), 1e-9 / work, local)
    recorded = ranks <= MAX_RECORDED_RANKS
    how = "recorded schedules" if recorded else f"closed forms (recorded up to {MAX_RECORDED_RANKS} ranks)"
    head = [
        f"{collective}, {ranks} ranks, {local} per node; {how}",
        f"between nodes {between:g} µs ({whence}) and {link:g} GB/s ({link_whence}), shared by the ranks of a node; "
        f"inside {inside:g} µs and {memory:g} GB/s; reducing and copying at {work:g} GB/s",
    ]
    lengths = [0] if collective == "barrier" else sizes(arguments.begin, arguments.end, arguments.factor)
    times = {
        name: [seconds(algorithm, ranks, size, cluster) for size in lengths]
        for name, algorithm in ALGORITHMS[collective].items()
    }
    if collective == "all_reduce" and nodes > 1 and local > 1:
        times["hierarchy"] = [hierarchical_cost(nodes, size / ITEM, ITEM, cluster) for size in lengths]
        head.append("hierarchy: reduce-scatter inside, all_reduce between nodes, all-gather inside; closed forms")
    show(head, lengths, times, COLLECTIVES[collective].bus_factor(ranks))
    return 0


def between_nodes(latency: float | None, bandwidth: float | None) -> list[tuple[float, str]]:
    """Return both constants with their sources: those given, else those by which a job on such machines chooses."""
    facts = [link_facts()]
    known = [[*link_parameters(Config(), facts, link)] for link in LINKS]
    best = next((each for each in known if any("measured" in source for _, source in each)), known[0])
    return [(value, "given") if value else found for value, found in zip((latency, bandwidth), best, strict=True)]


def show(head: list[str], lengths: list[int], times: dict[str, list[float]], bus_factor: float) -> None:
    names = f"{'size':>12}" + "".join(f" {name:>21}" for name in times) + "  fastest"
    units = f"{'(B)':>12}" + f" {'(us)':>12} {'(GB/s)':>8}" * len(times)
    print("\n".join(f"# {line}".rstrip() for line in [*head, "", names, units]))
    for size, row in zip(lengths, zip(*times.values(), strict=True), strict=True):
        figures = "".join(f" {time * 1e6:>12.2f} {size / time * bus_factor / 1e9:>8.3f}" for time in row)
        print(f"{size:>14}{figures}  {min(zip(row, times, strict=True))[1]}")


def seconds(algorithm: Algorithm, ranks: int, size: int, cluster: Cluster) -> float:
    """Return the time of a call by the recorded schedule, or by the closed form beyond MAX_RECORDED_RANKS."""
    elements = size / ITEM
    if ranks > MAX_RECORDED_RANKS:
        return algorithm_cost(algorithm, ranks, elements, ITEM, cluster)
    # Where the number of steps does not depend on the length, one recording serves all sizes: blocks scale with the
    # array. This many elements divide evenly by ranks and by powers of two.
    length = ranks << ranks.bit_length()
    if algorithm.steps(ranks, length) != algorithm.steps(ranks, int(elements)):
        length = int(elements)
    return schedule_cost(course(algorithm, ranks, length), size / length if length else 0, cluster)


@lru_cache(maxsize=1)  # all sizes of an algorithm come in a row
def course(algorithm: Algorithm, ranks: int, length: int) -> ScheduleTable:
    lengths = Lengths(even(length, ranks))
    # Without the cache of `record`: these are up to half a million steps.
    return ScheduleTable(record.__wrapped__(algorithm, rank, ranks, lengths) for rank in range(ranks))
