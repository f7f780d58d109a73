"""The cost of a small call: inside a host that of the cache lines which its ranks wait for, one after another.

The core counts the lines, because it chooses by them between one-shot and the tree, in an all_reduce, all_gather and
barrier. Between hosts the agreement carries the data of any small call (bindings/src/network/agreement.cpp).
"""

from typing import NamedTuple

from ringcomm.machine.topology import simulated_domain
from ringcomm.native import check, ffi, lib

__all__ = ["LINE_COST", "LineCost", "agreement_cost", "agreement_rounds", "small_call_lines"]


class LineCost(NamedTuple):
    """The cost of a call inside a host: call + line · lines."""

    call: float  # seconds
    line: float  # seconds that a cache line takes from one core to another and back

    def seconds(self, lines: int) -> float:
        return self.call + self.line * lines


# 16 cores of an Intel Xeon, where a line there and back takes 140 to 190 ns: by one-shot 4 bytes take 1.34 µs on 2
# ranks, which read 1 line each, and 3.93 µs on 16, which read 15.
LINE_COST = LineCost(call=1.15e-6, line=0.185e-6)


def small_call_lines(ranks: int, topology: str | None = None) -> int:
    """Return how many cache lines arrive one after another in a small all_reduce of ranks with a core each.

    `topology`: NUMA nodes x caches x ranks of the host, such as "2x4x8", filled in order; None: unknown.

    Raises ArgumentError unless there are 1 to 65,536 ranks.
    """
    lines = ffi.new("int *")
    places = [simulated_domain(topology, rank) if topology else (-1, -1) for rank in range(ranks)]
    check(lib.rc_small_call_lines(ranks, places, lines))
    return int(lines[0])


def agreement_rounds(hosts: int) -> int:
    """Return in how many rounds every host gets the records of all hosts."""
    return (hosts - 1).bit_length()


def agreement_cost(hosts: int, lines: int, cost: LineCost, latency: float) -> float:
    """Return the seconds of a small call between hosts whose messages take `latency` seconds.

    Where a host has several ranks, its first one gathers what they give, in `lines`, and broadcasts what has come.
    """
    inside = cost.seconds(lines) + cost.seconds(1) if lines else 0.0
    return agreement_rounds(hosts) * latency + inside
