"""`ringcomm simulate`: predict the time of each algorithm on many machines, and the fastest one at each size.

Also what a job takes there for small calls, inside a node and between nodes, and for its start.
"""

import argparse
from collections.abc import Iterator
from functools import lru_cache
from math import prod

from ringcomm import ArgumentError
from ringcomm.algorithms import ALGORITHMS, Algorithm, record
from ringcomm.algorithms.cost import CLUSTER, Cluster, LinkCost, algorithm_cost, schedule_cost
from ringcomm.algorithms.link_parameters import LINKS, link_facts, link_parameters
from ringcomm.algorithms.schedule import Lengths, even
from ringcomm.algorithms.schedule_table import ScheduleTable
from ringcomm.algorithms.select import hierarchical_cost
from ringcomm.algorithms.small_call_cost import LINE_COST, LineCost, agreement_cost, agreement_rounds, small_call_lines
from ringcomm.bench.rank.collectives import COLLECTIVES
from ringcomm.bootstrap.start_cost import start_cost
from ringcomm.config import Config
from ringcomm.errors import refuse
from ringcomm.launcher.processes import MAX_RANKS
from ringcomm.options import parse_bytes, positive, sizes, whole

__all__ = ["MAX_RECORDED_RANKS", "add_arguments", "run", "seconds"]

MAX_RECORDED_RANKS = 512  # recording the schedules of more takes too long
ITEM = 4  # bytes: float32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("collective", choices=ALGORITHMS, metavar="COLLECTIVE", help=", ".join(ALGORITHMS))
    add("-n", "--ranks", type=whole(1), metavar="N", help="ranks per node (default: those of --topology, else 1)")
    add("--nodes", type=whole(1), default=1, metavar="N", help="number of nodes (default: 1)")
    text = "NUMA nodes x caches x ranks of a node, such as 2x4x8 (default: unknown)"
    add("--topology", metavar="SHAPE", help=text)
    add("-b", "--begin", type=parse_bytes, default="4", metavar="BYTES", help="first size (default: 4)")
    add("-e", "--end", type=parse_bytes, default="256M", metavar="BYTES", help="last size (default: 256M)")
    add("-f", "--factor", type=whole(2), default=4, help="ratio of each size to the one before (default: 4)")
    (latency, byte_time), between, gamma, *_ = CLUSTER
    for name, values, what in (
        ("--latency", (between.latency * 1e6, latency * 1e6), "µs per message between nodes, and inside a node"),
        ("--bandwidth", (1e-9 / between.byte_time, 1e-9 / byte_time), "GB/s of a node's link, and between its ranks"),
    ):
        shown = f"{values[0]:g} {values[1]:g}, or as `ringcomm tune --network` has measured between such machines"
        text = f"{what} (default: {shown})"
        add(name, type=positive, nargs=2, default=(None, values[1]), metavar=("BETWEEN", "INSIDE"), help=text)
    text = "GB/s that one connection between two ranks carries (default: as much as the link)"
    add("--flow", type=positive, metavar="GB/s", help=text)
    add("--connections", type=whole(1), metavar="N", help="connections between two ranks, with --flow (default: 1)")
    default = tuple(each * 1e6 for each in LINE_COST)
    shown = f"{default[0]:g} {default[1]:g}"
    text = f"µs of a small all_reduce beside its cache lines, and of each there and back (default: {shown})"
    add("--small-call", type=positive, nargs=2, default=default, metavar=("CALL", "LINE"), help=text)
    text = f"GB/s at which a rank reduces or copies (default: {1e-9 / gamma:g})"
    add("--reduce-bandwidth", type=positive, default=1e-9 / gamma, metavar="GB/s", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Print a table: time and bus bandwidth of each algorithm at each size."""
    collective, nodes, local = arguments.collective, arguments.nodes, ranks_per_node(arguments)
    ranks = local * nodes
    if ranks < 2:
        raise ArgumentError("one rank does not communicate: expected -n or --nodes")
    if arguments.connections and not arguments.flow:
        raise refuse("--connections", "--flow beside it, the GB/s of one connection", arguments.connections)
    (given_latency, inside), (given_bandwidth, memory) = arguments.latency, arguments.bandwidth
    (between, whence), (link, link_whence) = between_nodes(given_latency, given_bandwidth)
    work, connections = arguments.reduce_bandwidth, arguments.connections or 1
    flow = 1e-9 / (connections * arguments.flow) if arguments.flow else 0
    links = LinkCost(inside / 1e6, 1e-9 / memory), LinkCost(between / 1e6, 1e-9 / link)
    cluster = Cluster(*links, 1e-9 / work, local, flow)
    recorded = ranks <= MAX_RECORDED_RANKS
    how = "recorded schedules" if recorded else f"closed forms (recorded up to {MAX_RECORDED_RANKS} ranks)"
    carried = f", {counted(connections, 'connection')} of {arguments.flow:g} GB/s for two ranks" if flow else ""
    head = [
        f"{collective}, {ranks} ranks, {local} per node; {how}",
        f"between nodes {between:g} µs ({whence}) and {link:g} GB/s ({link_whence}), shared by the ranks of a node"
        f"{carried}; inside {inside:g} µs and {memory:g} GB/s; reducing and copying at {work:g} GB/s",
    ]
    lengths = [0] if collective == "barrier" else sizes(arguments.begin, arguments.end, arguments.factor)
    times = {
        name: [seconds(algorithm, ranks, size, cluster) for size in lengths]
        for name, algorithm in ALGORITHMS[collective].items()
    }
    line_cost = LineCost(*(each / 1e6 for each in arguments.small_call))
    if collective == "all_reduce" and nodes > 1 and local > 1:
        # A stage begins when each rank has read the start records of its peers.
        staged = cluster._replace(intra_node=LinkCost(line_cost.seconds(local - 1), 1e-9 / memory))
        times["hierarchy"] = [hierarchical_cost(nodes, size / ITEM, ITEM, staged) for size in lengths]
        head.append("hierarchy: reduce-scatter inside, all_reduce between nodes, all-gather inside; closed forms")
    head += job_lines(nodes, arguments.topology, cluster, line_cost)
    show(head, lengths, times, COLLECTIVES[collective].bus_factor(ranks))
    return 0


def ranks_per_node(arguments: argparse.Namespace) -> int:
    """Return the ranks of a node; raise ArgumentError if it has no room for them."""
    topology = Config(topology=arguments.topology).topology if arguments.topology else None
    room = prod(map(int, topology.split("x"))) if topology else MAX_RANKS
    local = arguments.ranks or (room if topology else 1)
    if local > MAX_RANKS:
        raise refuse("ranks per node", f"at most {MAX_RANKS}", local)
    if local > room:
        raise refuse("--topology", f"room for {local} ranks", f"{topology}, which has {room}")
    return int(local)


def job_lines(nodes: int, topology: str | None, cluster: Cluster, cost: LineCost) -> Iterator[str]:
    """Yield what a job takes for a small all_reduce inside a node, a small call between nodes, and its start."""
    local, (latency, byte_time) = cluster.ranks, cluster.inter_node
    lines, rounds, connections = small_call_lines(local, topology), agreement_rounds(nodes), nodes - 1  # of a rail
    if local > 1:
        tree = f", through the tree ({local - 1} without)" * (lines < local - 1)
        yield (
            f"a small all_reduce inside a node: {cost.seconds(lines) * 1e6:.2f} µs, with "
            f"{counted(lines, 'cache line')} of {cost.line * 1e9:g} ns one after another{tree}"
        )
    if nodes > 1:
        between = agreement_cost(nodes, lines, cost, latency) * 1e6
        yield f"a small call between nodes: {between:.2f} µs, with {counted(rounds, 'round')} of {latency * 1e6:g} µs"
    server, facts, rank = start_cost(nodes, local, connections, byte_time)
    yield (
        f"a start: {server + facts + rank:.3f} s, of which {server:.3f} s on the server of the store, {facts:.3f} s "
        f"for what it sends, and {rank:.3f} s on each rank, with {counted(connections, 'connection')} to other nodes"
    )


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


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
