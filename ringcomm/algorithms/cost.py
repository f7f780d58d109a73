"""What a call costs: a recorded schedule run through a model of the machines (`price`), or a closed form (`bound`).

The model has three constants: a message takes α seconds and β for each byte, and a rank works γ for each byte that it
reduces or copies (Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994)). It knows two kinds of
links, inside a node and between nodes. All ranks start at once; the price is the time at which the last one is done.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ringcomm.algorithms.rounds import ROUNDS, Rounds
from ringcomm.algorithms.schedule import Algorithm
from ringcomm.algorithms.waves import Course

__all__ = ["CLUSTER", "Cluster", "Link", "bound", "closed_form", "price"]


class Link(NamedTuple):
    """What a message costs."""

    alpha: float  # seconds
    beta: float  # seconds per byte


class Cluster(NamedTuple):
    """Nodes of `ranks` ranks each, in order: ranks 0 to `ranks` - 1 share the first one."""

    inside: Link
    between: Link  # a node has one, for each direction; its ranks share it
    gamma: float  # seconds per byte that a rank reduces or copies
    ranks: int


# Between nodes: Python's cost of a step, MPI's of a message, and a network of 100 Gbit/s, most of it used. Inside: the
# same without the network. A core reduces about as fast as it copies.
CLUSTER = Cluster(inside=Link(10e-6, 1 / 10e9), between=Link(20e-6, 1 / 10e9), gamma=1 / 10e9, ranks=1)


def price(course: Course, item: float, cluster: Cluster) -> float:
    """Return the time after which all ranks are done, in seconds; `item` are the bytes of an element.

    A transfer starts when both of its ranks are there, and takes α + β · bytes of its link. Both halves of an exchange
    run at once; what came is then reduced, and the rank goes on when its halves are done. The transfers of one wave
    that leave or enter the same node share its link: each of m takes m times as long for its bytes. Those of different
    waves do not hinder each other, also where they overlap in time.
    """
    node = np.arange(len(course.steps)) // cluster.ranks
    ready = np.zeros(len(node))  # when each rank came to its step
    done = np.zeros(len(node))  # when what is known of that step is over
    for wave in course.waves():
        of, to = wave.senders, wave.receivers
        out = node[of] != node[to]
        left, entered = (np.bincount(node[ranks[out]], minlength=len(node)) for ranks in (of, to))
        lanes = np.maximum(left[node[of]], entered[node[to]])
        alpha = np.where(out, cluster.between.alpha, cluster.inside.alpha)
        beta = np.where(out, cluster.between.beta * lanes, cluster.inside.beta)
        arrived = np.maximum(ready[of], ready[to]) + alpha + beta * (wave.length * item)
        done[of] = np.maximum(done[of], arrived)
        done[to] = np.maximum(done[to], arrived + cluster.gamma * (wave.reduced * item))
        done[wave.done] += cluster.gamma * (wave.copied * item)
        ready[wave.done] = done[wave.done]
    return float(done.max())


def bound(rounds: Iterable[Rounds], size: int, item: float, cluster: Cluster) -> float:
    """Return the time of these rounds on `size` ranks, in seconds; `item` as for `price`.

    Where all links are of one kind and none is shared it is the price, exactly. Else it is never less: no rank starts a
    round before all have ended the one before.
    """
    total = 0.0
    for times, elements, within, lanes, worked in rounds:
        if within == 1:
            alpha, beta = 0.0, 0.0
        elif size <= cluster.ranks or cluster.ranks % within == 0:
            alpha, beta = cluster.inside
        else:
            alpha, beta = cluster.between
            beta *= min(lanes, cluster.ranks)
        total += times * (alpha + (beta * elements + cluster.gamma * worked) * item)
    return total


def closed_form(algorithm: Algorithm, size: int, elements: float, item: float, cluster: Cluster) -> float:
    """Return what `bound` says of an algorithm, for so many elements in the larger array."""
    return bound(ROUNDS[algorithm.collective, algorithm.name](size, elements), size, item, cluster)
