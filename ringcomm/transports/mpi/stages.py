"""Collectives of ranks on several hosts, put together from collectives inside the hosts and between them.

The first ranks of every host, as many as each host has, are the ends of *lanes*: lane i joins the i-th ranks of all
hosts. A collective has three stages: something inside each host that gives every lane an equal slice of the data; the
collective itself between the hosts, on all lanes at once; and something inside each host that joins the slices.

| collective | to the lanes | between hosts | from the lanes |
|---|---|---|---|
| all_reduce | reduce_scatter | all_reduce | all_gather |
| reduce | reduce_scatter | reduce | gather, on the host of the root |
| broadcast | broadcast, on the host of the root | broadcast | all_gather, on the others |
| all_gather | blocks to slices | all_gather | all_gather |
| gather | blocks to slices | gather | gather, on the host of the root |
| scatter | scatter, on the host of the root | scatter | slices to blocks |
| reduce_scatter | reduce_scatter | reduce_scatter | slices to blocks |

Blocks to slices, and back, is an all_to_all. So nothing goes from one host to another twice, and all lanes carry as
much. In an all_to_all the blocks for other hosts go straight to their ranks.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from ringcomm.algorithms.schedule import even
from ringcomm.transports.blocks import Blockwise, Bytes, Steps

__all__ = ["Hosts", "Stages"]

Rows = Sequence[int]
Stage = Callable[[str, Bytes, Bytes, Rows | None, int], Steps]  # collective, source, target, rows of all, root


def cut(data: Bytes, rows: Rows, item: int) -> list[Bytes]:
    """Divide bytes into blocks of so many elements."""
    return [data[begin * item : end * item] for begin, end in pairwise(accumulate(rows, initial=0))]


def overlaps(which: int, rows: Rows, others: Rows) -> list[int]:
    """Return how much of one block lies in each of other blocks, where both divide the same whole."""
    first, last = list(pairwise(accumulate(rows, initial=0)))[which]
    return [max(0, min(last, end) - max(first, begin)) for begin, end in pairwise(accumulate(others, initial=0))]


@dataclass(frozen=True)
class Hosts:
    """Where the ranks of a group are, seen from one of them."""

    ranks: list[list[int]]  # of each host, as they are numbered there
    host: int
    place: int  # among the ranks of its host

    @property
    def lanes(self) -> int:
        return min(map(len, self.ranks))

    @property
    def here(self) -> list[int]:
        return self.ranks[self.host]

    def slices(self, count: int) -> list[int]:
        """Divide so many elements among the ranks of this host: those at the end of no lane get none."""
        return [*even(count, self.lanes), *[0] * (len(self.here) - self.lanes)]

    def of(self, rank: int) -> tuple[int, int]:
        """Return the host of a rank, and its place there."""
        return next((host, ranks.index(rank)) for host, ranks in enumerate(self.ranks) if rank in ranks)


class Stages:
    """One call: `inside` is done by the ranks of this host, `across` by those of this lane, `apart` by all."""

    def __init__(
        self,
        hosts: Hosts,
        call: Blockwise,
        source: Bytes,
        target: Bytes,
        inside: Stage,
        across: Stage,
        apart: Callable[[Bytes, Bytes], Steps],
    ) -> None:
        self._hosts, self._call = hosts, call
        self._source, self._target = source, target
        self._inside, self._across, self._apart = inside, across, apart
        self._item = call.item
        self._root_host, self._root_place = hosts.of(call.root)

    def run(self) -> Steps:
        steps: Steps = getattr(self, f"_{self._call.name}")()
        return steps

    # --- Arrays of one shape on all ranks -----------------------------------------------------------------------------

    def _all_reduce(self) -> Steps:
        slices, mine = self._slice(self._target)
        yield from self._inside("reduce_scatter", self._source, mine, slices, 0)
        yield from self._across("all_reduce", mine, mine, None, 0)
        yield from self._inside("all_gather", mine, self._target, slices, 0)

    def _reduce(self) -> Steps:
        slices, mine = self._slice(np.empty_like(self._source))
        yield from self._inside("reduce_scatter", self._source, mine, slices, 0)
        yield from self._across("reduce", mine, mine, None, self._root_host)
        if self._hosts.host == self._root_host:
            yield from self._inside("gather", mine, self._target, slices, self._root_place)

    def _broadcast(self) -> Steps:
        slices, mine = self._slice(self._target)
        if self._hosts.host == self._root_host:
            yield from self._inside("broadcast", self._target, self._target, None, self._root_place)
        yield from self._across("broadcast", mine, mine, None, self._root_host)
        if self._hosts.host != self._root_host:
            yield from self._inside("all_gather", mine, self._target, slices, 0)

    # --- Blocks of the ranks ------------------------------------------------------------------------------------------

    def _all_gather(self) -> Steps:
        mine = yield from self._to_slices()
        joined = self._empty(self._lane_rows())
        yield from self._across("all_gather", mine, joined, self._lane_rows(), 0)
        lanes = self._empty(self._lane_totals())
        yield from self._inside("all_gather", joined, lanes, self._lane_totals(), 0)
        self._to_ranks(lanes)

    def _gather(self) -> Steps:
        mine = yield from self._to_slices()
        here = self._hosts.host == self._root_host
        joined = self._empty(self._lane_rows() if here else [])
        yield from self._across("gather", mine, joined, self._lane_rows(), self._root_host)
        if here:
            is_root = self._hosts.place == self._root_place
            lanes = self._empty(self._lane_totals() if is_root else [])
            yield from self._inside("gather", joined, lanes, self._lane_totals(), self._root_place)
            if is_root:
                self._to_ranks(lanes)

    def _scatter(self) -> Steps:
        joined = self._empty([])
        if self._hosts.host == self._root_host:
            is_root = self._hosts.place == self._root_place
            lanes = self._to_lanes() if is_root else joined
            joined = self._empty(self._lane_rows())
            yield from self._inside("scatter", lanes, joined, self._lane_totals(), self._root_place)
        mine = self._empty([self._lane_rows()[self._hosts.host]])
        yield from self._across("scatter", joined, mine, self._lane_rows(), self._root_host)
        yield from self._from_slices(mine)

    def _reduce_scatter(self) -> Steps:
        joined = self._empty(self._lane_rows())
        yield from self._inside("reduce_scatter", self._to_lanes(), joined, self._lane_totals(), 0)
        mine = self._empty([self._lane_rows()[self._hosts.host]])
        yield from self._across("reduce_scatter", joined, mine, self._lane_rows(), 0)
        yield from self._from_slices(mine)

    def _all_to_all(self) -> Steps:
        here, item = self._hosts.here, self._item
        goes, comes = ([rows[rank] for rank in here] for rows in (self._call.rows, self._call.come))
        outgoing = cut(self._source, self._call.rows, item)
        mine = np.concatenate([outgoing[rank] for rank in here])
        theirs = self._empty(comes)
        yield from self._inside("all_to_all", mine, theirs, [*goes, *comes], 0)
        yield from self._apart(self._source, self._target)
        incoming = cut(self._target, self._call.come, item)
        for rank, block in zip(here, cut(theirs, comes, item), strict=True):
            incoming[rank][:] = block

    # --- Slices -------------------------------------------------------------------------------------------------------

    def _slice(self, data: Bytes) -> tuple[list[int], Bytes]:
        slices = self._hosts.slices(self._call.count)
        return slices, cut(data, slices, self._item)[self._hosts.place]

    def _totals(self) -> list[int]:
        """Return the elements of each host."""
        return [sum(self._call.rows[rank] for rank in ranks) for ranks in self._hosts.ranks]

    def _lane_rows(self, lane: int | None = None) -> list[int]:
        """Return the elements of each host on a lane, by default on this rank's; none if it is at the end of none."""
        lane = self._hosts.place if lane is None else lane
        return [even(total, self._hosts.lanes)[lane] if lane < self._hosts.lanes else 0 for total in self._totals()]

    def _lane_totals(self) -> list[int]:
        """Return the elements on the lane of each rank of this host."""
        return [sum(self._lane_rows(lane)) for lane in range(len(self._hosts.here))]

    def _empty(self, rows: Rows) -> Bytes:
        return np.empty(sum(rows) * self._item, np.uint8)

    def _to_slices(self) -> Generator[None, None, Bytes]:
        """Turn the blocks of the ranks of this host into slices for its lanes."""
        blocks = [self._call.rows[rank] for rank in self._hosts.here]
        slices, place = self._hosts.slices(sum(blocks)), self._hosts.place
        mine = self._empty([slices[place]])
        counts = [*overlaps(place, blocks, slices), *overlaps(place, slices, blocks)]
        yield from self._inside("all_to_all", self._source, mine, counts, 0)
        return mine

    def _from_slices(self, mine: Bytes) -> Steps:
        """Turn the slices of the lanes into the blocks of the ranks of this host."""
        blocks = [self._call.rows[rank] for rank in self._hosts.here]
        slices, place = self._hosts.slices(sum(blocks)), self._hosts.place
        counts = [*overlaps(place, slices, blocks), *overlaps(place, blocks, slices)]
        yield from self._inside("all_to_all", mine, self._target, counts, 0)

    def _parts(self, lanes: Bytes, whole: Bytes) -> list[tuple[Bytes, Bytes]]:
        """Return what belongs together of all data as the lanes have it, and as it is host after host."""
        table = [self._lane_rows(lane) for lane in range(self._hosts.lanes)]
        on_lanes = cut(lanes, [count for row in table for count in row], self._item)
        on_hosts = cut(whole, [row[host] for host in range(len(self._hosts.ranks)) for row in table], self._item)
        count = len(self._hosts.ranks)
        return [
            (on_lanes[lane * count + host], on_hosts[host * len(table) + lane])
            for lane in range(len(table))
            for host in range(count)
        ]

    def _by_host(self, data: Bytes) -> tuple[Bytes, list[tuple[Bytes, Bytes]]]:
        """Return memory for the blocks of all ranks host after host, and what belongs together of it and of `data`."""
        order = [rank for ranks in self._hosts.ranks for rank in ranks]
        if order == sorted(order):
            return data, []
        memory = np.empty_like(data)
        blocks = cut(data, self._call.rows, self._item)
        places = cut(memory, [self._call.rows[rank] for rank in order], self._item)
        return memory, [(place, blocks[rank]) for place, rank in zip(places, order, strict=True)]

    def _to_ranks(self, lanes: Bytes) -> None:
        """Write all data, as the lanes have it, to the target."""
        whole, pairs = self._by_host(self._target)
        for part, place in [*self._parts(lanes, whole), *pairs]:
            place[:] = part

    def _to_lanes(self) -> Bytes:
        """Return the blocks of the source as the lanes have them."""
        lanes = np.empty_like(self._source)
        whole, pairs = self._by_host(self._source)
        for place, block in pairs:
            place[:] = block
        for part, place in self._parts(lanes, whole):
            part[:] = place
        return lanes
