"""`ringcomm simulate`: what each algorithm would take on many machines, and which one wins at which size."""

import argparse
from functools import lru_cache
from itertools import count, takewhile

from ringcomm import ArgumentError
from ringcomm.algorithms import ALGORITHMS, Algorithm, record
from ringcomm.algorithms.cost import CLUSTER, Cluster, Link, closed_form, price
from ringcomm.algorithms.schedule import Lengths, even
from ringcomm.algorithms.select import hierarchy
from ringcomm.algorithms.waves import Course
from ringcomm.bench.plan import parse_bytes, positive, whole
from ringcomm.bench.rank.collectives import COLLECTIVES

__all__ = ["RECORDED", "add_arguments", "run", "seconds"]

RECORDED = 512  # ranks; to record more takes too long
ITEM = 4  # bytes: float32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("collective", choices=ALGORITHMS, metavar="COLLECTIVE", help=", ".join(ALGORITHMS))
    add("-n", "--ranks", type=whole(1), default=1, metavar="N", help="ranks of each node (default: 1)")
    add("--nodes", type=whole(1), default=1, metavar="N", help="default: 1")
    add("-b", "--begin", type=parse_bytes, default="4", metavar="BYTES", help="first size (default: 4)")
    add("-e", "--end", type=parse_bytes, default="256M", metavar="BYTES", help="last size (default: 256M)")
    add("-f", "--factor", type=whole(2), default=4, help="from each size to the next (default: 4)")
    inside, between, gamma, _ = CLUSTER
    for name, values, what in (
        ("--alpha", (between.alpha * 1e6, inside.alpha * 1e6), "µs of a message between two nodes, and inside a node"),
        ("--beta", (1e-9 / between.beta, 1e-9 / inside.beta), "GB/s of a node's link, and from rank to rank inside it"),
        ("--gamma", (1e-9 / gamma,), "GB/s at which a rank reduces or copies"),
    ):
        shown = " ".join(f"{value:g}" for value in values)
        metavar = ("BETWEEN", "INSIDE") if len(values) == 2 else "GB/s"
        add(name, type=positive, nargs=len(values), default=values, metavar=metavar, help=f"{what} (default: {shown})")


def run(arguments: argparse.Namespace) -> int:
    """Print a table: for each size, time and bus bandwidth of each algorithm."""
    collective, local, nodes = arguments.collective, arguments.ranks, arguments.nodes
    ranks = local * nodes
    if arguments.begin > arguments.end:
        raise ArgumentError(f"sizes: expected -b <= -e, got {arguments.begin} > {arguments.end} bytes")
    if ranks < 2:
        raise ArgumentError("one rank has nobody to talk to: expected -n or --nodes")
    (between, inside), (link, memory), (work,) = arguments.alpha, arguments.beta, arguments.gamma
    cluster = Cluster(Link(inside / 1e6, 1e-9 / memory), Link(between / 1e6, 1e-9 / link), 1e-9 / work, local)
    how = "recorded schedules" if ranks <= RECORDED else f"closed forms (recorded up to {RECORDED} ranks)"
    head = [
        f"{collective}, {ranks} ranks, {local} on each node; by {how}",
        f"between nodes {between:g} µs and {link:g} GB/s, shared by the ranks of a node; inside {inside:g} µs and "
        f"{memory:g} GB/s; reducing and copying at {work:g} GB/s",
    ]
    growing = (arguments.begin * arguments.factor**i for i in count())
    sizes = [0] if collective == "barrier" else [*takewhile(lambda size: size <= arguments.end, growing)]
    times = {
        name: [seconds(algorithm, ranks, size, cluster) for size in sizes]
        for name, algorithm in ALGORITHMS[collective].items()
    }
    if collective == "all_reduce" and nodes > 1 and local > 1:
        times["hierarchy"] = [hierarchy(nodes, size / ITEM, ITEM, cluster) for size in sizes]
        head.append("hierarchy: reduce-scatter inside, all_reduce between nodes, all-gather inside; by closed forms")
    show(head, sizes, times, COLLECTIVES[collective].bus_factor(ranks))
    return 0


def show(head: list[str], sizes: list[int], times: dict[str, list[float]], bus_factor: float) -> None:
    names = f"{'size':>12}" + "".join(f" {name:>21}" for name in times) + "  fastest"
    units = f"{'(B)':>12}" + f" {'(us)':>12} {'(GB/s)':>8}" * len(times)
    print("\n".join(f"# {line}".rstrip() for line in [*head, "", names, units]))
    for size, row in zip(sizes, zip(*times.values(), strict=True), strict=True):
        figures = "".join(f" {time * 1e6:>12.2f} {size / time * bus_factor / 1e9:>8.3f}" for time in row)
        print(f"{size:>14}{figures}  {min(zip(row, times, strict=True))[1]}")


def seconds(algorithm: Algorithm, ranks: int, size: int, cluster: Cluster) -> float:
    """Return what a call takes by the recorded schedule, or by the closed form where there are too many ranks."""
    elements = size / ITEM
    if ranks > RECORDED:
        return closed_form(algorithm, ranks, elements, ITEM, cluster)
    # A schedule that does not have more steps for more elements is one for all sizes, each block in proportion. This
    # many elements divide evenly by ranks and by powers of two.
    length = ranks << ranks.bit_length()
    if algorithm.steps(ranks, length) != algorithm.steps(ranks, int(elements)):
        length = int(elements)
    return price(course(algorithm, ranks, length), size / length if length else 0, cluster)


@lru_cache(maxsize=1)  # the sizes of one algorithm follow on each other
def course(algorithm: Algorithm, ranks: int, length: int) -> Course:
    lengths = Lengths(even(length, ranks))
    # Not kept: half a million steps.
    return Course.of(record.__wrapped__(algorithm, rank, ranks, lengths) for rank in range(ranks))
