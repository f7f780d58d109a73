"""Hierarchical collectives: composed of collectives inside each host and between hosts.

A *rail* joins the ranks of one index on each host: rail i joins the i-th ranks of all hosts. There are as many rails as
the smallest host has ranks. A collective has three stages: one inside each host, which gives every rail an equal slice
of the data; the collective itself between the hosts, on all rails at once; and one inside each host, which joins the
slices.

| collective | to the rails | between hosts | from the rails |
|---|---|---|---|
| all_reduce | reduce_scatter | all_reduce | all_gather |
| reduce | reduce_scatter | reduce | gather, on the host of the root |
| broadcast | broadcast, on the host of the root | broadcast | all_gather, on the others |
| all_gather | blocks to slices | all_gather | all_gather |
| gather | blocks to slices | gather | gather, on the host of the root |
| scatter | scatter, on the host of the root | scatter | slices to blocks |
| reduce_scatter | reduce_scatter | reduce_scatter | slices to blocks |

Blocks to slices, and back, is an all_to_all. So no data crosses between two hosts twice, and all rails carry the same
load. In an all_to_all the blocks for other hosts go straight to their ranks.
"""

from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from ringcomm.algorithms.schedule import even
from ringcomm.transports.blocks import Blockwise, Bytes, Steps
from ringcomm.transports.network.layout import HostLayout

__all__ = ["Counts", "HierarchicalCollective"]

Counts = Sequence[int]
Stage = Callable[[str, Bytes, Bytes, Counts | None, int], Steps]  # collective, source, target, counts, root


def cut(data: Bytes, counts: Counts, item: int) -> list[Bytes]:
    """Divide bytes into blocks of these numbers of elements."""
    return [data[begin * item : end * item] for begin, end in pairwise(accumulate(counts, initial=0))]


def overlaps(which: int, counts: Counts, others: Counts) -> list[int]:
    """Return how many elements of one block lie in each of the other blocks; both divide the same array."""
    first, last = list(pairwise(accumulate(counts, initial=0)))[which]
    return [max(0, min(last, end) - max(first, begin)) for begin, end in pairwise(accumulate(others, initial=0))]


class HierarchicalCollective:
    """One call: `intra_host` runs on the ranks of this host, `inter_host` on this rail, `exchange` on all ranks."""

    def __init__(
        self,
        hosts: HostLayout,
        call: Blockwise,
        source: Bytes,
        target: Bytes,
        intra_host: Stage,
        inter_host: Stage,
        exchange: Callable[[Bytes, Bytes], Steps],
    ) -> None:
        self._hosts, self._call, self._item = hosts, call, call.item
        self._source, self._target = source, target
        self._intra_host, self._inter_host, self._exchange = intra_host, inter_host, exchange
        self._root_host, self._root_local_rank = hosts.locate(call.root)
        self._on_root_host = hosts.host == self._root_host

    def run(self) -> Steps:
        steps: Steps = getattr(self, f"_{self._call.name}")()
        return steps

    # --- Arrays of one shape on all ranks -----------------------------------------------------------------------------

    def _all_reduce(self) -> Steps:
        slices, mine = self._slice(self._target)
        yield from self._intra_host("reduce_scatter", self._source, mine, slices, 0)
        yield from self._inter_host("all_reduce", mine, mine, None, 0)
        yield from self._intra_host("all_gather", mine, self._target, slices, 0)

    def _reduce(self) -> Steps:
        slices, mine = self._slice(np.empty_like(self._source))
        yield from self._intra_host("reduce_scatter", self._source, mine, slices, 0)
        yield from self._inter_host("reduce", mine, mine, None, self._root_host)
        if self._on_root_host:
            yield from self._intra_host("gather", mine, self._target, slices, self._root_local_rank)

    def _broadcast(self) -> Steps:
        slices, mine = self._slice(self._target)
        if self._on_root_host:
            yield from self._intra_host("broadcast", self._target, self._target, None, self._root_local_rank)
        yield from self._inter_host("broadcast", mine, mine, None, self._root_host)
        if not self._on_root_host:
            yield from self._intra_host("all_gather", mine, self._target, slices, 0)

    # --- Blocks of the ranks ------------------------------------------------------------------------------------------

    def _all_gather(self) -> Steps:
        mine = yield from self._to_slices()
        joined = self._empty(self._rail_counts())
        yield from self._inter_host("all_gather", mine, joined, self._rail_counts(), 0)
        rails = self._empty(self._rail_totals())
        yield from self._intra_host("all_gather", joined, rails, self._rail_totals(), 0)
        self._to_ranks(rails)

    def _gather(self) -> Steps:
        mine = yield from self._to_slices()
        joined = self._empty(self._rail_counts() if self._on_root_host else [])
        yield from self._inter_host("gather", mine, joined, self._rail_counts(), self._root_host)
        if self._on_root_host:
            is_root = self._hosts.local_rank == self._root_local_rank
            rails = self._empty(self._rail_totals() if is_root else [])
            yield from self._intra_host("gather", joined, rails, self._rail_totals(), self._root_local_rank)
            if is_root:
                self._to_ranks(rails)

    def _scatter(self) -> Steps:
        joined = self._empty([])
        if self._on_root_host:
            is_root = self._hosts.local_rank == self._root_local_rank
            rails = self._to_rails() if is_root else joined
            joined = self._empty(self._rail_counts())
            yield from self._intra_host("scatter", rails, joined, self._rail_totals(), self._root_local_rank)
        mine = self._empty([self._rail_counts()[self._hosts.host]])
        yield from self._inter_host("scatter", joined, mine, self._rail_counts(), self._root_host)
        yield from self._from_slices(mine)

    def _reduce_scatter(self) -> Steps:
        joined = self._empty(self._rail_counts())
        yield from self._intra_host("reduce_scatter", self._to_rails(), joined, self._rail_totals(), 0)
        mine = self._empty([self._rail_counts()[self._hosts.host]])
        yield from self._inter_host("reduce_scatter", joined, mine, self._rail_counts(), 0)
        yield from self._from_slices(mine)

    def _all_to_all(self) -> Steps:
        local, item = self._hosts.local_ranks, self._item
        send_counts, receive_counts = (
            [rows[rank] for rank in local] for rows in (self._call.rows, self._call.recv_rows)
        )
        outgoing = cut(self._source, self._call.rows, item)
        mine = np.concatenate([outgoing[rank] for rank in local])
        theirs = self._empty(receive_counts)
        yield from self._intra_host("all_to_all", mine, theirs, [*send_counts, *receive_counts], 0)
        yield from self._exchange(self._source, self._target)
        incoming = cut(self._target, self._call.recv_rows, item)
        for rank, block in zip(local, cut(theirs, receive_counts, item), strict=True):
            incoming[rank][:] = block

    # --- Slices -------------------------------------------------------------------------------------------------------

    def _slice(self, data: Bytes) -> tuple[list[int], Bytes]:
        slices = self._hosts.slices(self._call.count)
        return slices, cut(data, slices, self._item)[self._hosts.local_rank]

    def _rail_counts(self, rail: int | None = None) -> list[int]:
        """Return the elements of each host on a rail, by default this rank's; zeros for a rank without a rail."""
        rail, rails = self._hosts.local_rank if rail is None else rail, self._hosts.rails
        totals = [sum(self._call.rows[rank] for rank in ranks) for ranks in self._hosts.ranks]
        return [even(total, rails)[rail] if rail < rails else 0 for total in totals]

    def _rail_totals(self) -> list[int]:
        """Return the elements on the rail of each rank of this host."""
        return [sum(self._rail_counts(rail)) for rail in range(len(self._hosts.local_ranks))]

    def _empty(self, counts: Counts) -> Bytes:
        return np.empty(sum(counts) * self._item, np.uint8)

    def _local_blocks_and_slices(self) -> tuple[list[int], list[int]]:
        """Return the elements of this host's data as blocks of its ranks, and as slices of the rails."""
        blocks = [self._call.rows[rank] for rank in self._hosts.local_ranks]
        return blocks, self._hosts.slices(sum(blocks))

    def _to_slices(self) -> Generator[None, None, Bytes]:
        """Turn the blocks of this host's ranks into slices for its rails."""
        (blocks, slices), local_rank = self._local_blocks_and_slices(), self._hosts.local_rank
        mine = self._empty([slices[local_rank]])
        counts = [*overlaps(local_rank, blocks, slices), *overlaps(local_rank, slices, blocks)]
        yield from self._intra_host("all_to_all", self._source, mine, counts, 0)
        return mine

    def _from_slices(self, mine: Bytes) -> Steps:
        """Turn the slices of the rails into the blocks of this host's ranks."""
        (blocks, slices), local_rank = self._local_blocks_and_slices(), self._hosts.local_rank
        counts = [*overlaps(local_rank, slices, blocks), *overlaps(local_rank, blocks, slices)]
        yield from self._intra_host("all_to_all", mine, self._target, counts, 0)

    def _parts(self, by_rail: Bytes, by_host: Bytes) -> list[tuple[Bytes, Bytes]]:
        """Return the pairs of corresponding parts of all data in rail order and in host order."""
        rails, hosts = range(self._hosts.rails), range(len(self._hosts.ranks))
        table = [self._rail_counts(rail) for rail in rails]
        on_rails = cut(by_rail, [table[rail][host] for rail in rails for host in hosts], self._item)
        on_hosts = cut(by_host, [table[rail][host] for host in hosts for rail in rails], self._item)
        return [
            (on_rails[rail * len(hosts) + host], on_hosts[host * len(rails) + rail]) for rail in rails for host in hosts
        ]

    def _host_order(self, data: Bytes) -> tuple[Bytes, list[tuple[Bytes, Bytes]]]:
        """Return memory for the blocks of all ranks in host order, and the pairs of its blocks and those of `data`."""
        order = [rank for ranks in self._hosts.ranks for rank in ranks]
        if order == sorted(order):
            return data, []
        memory = np.empty_like(data)
        blocks = cut(data, self._call.rows, self._item)
        ordered = cut(memory, [self._call.rows[rank] for rank in order], self._item)
        return memory, [(block, blocks[rank]) for block, rank in zip(ordered, order, strict=True)]

    def _to_ranks(self, by_rail: Bytes) -> None:
        """Write all data, given in rail order, to the target."""
        by_host, pairs = self._host_order(self._target)
        for source, target in [*self._parts(by_rail, by_host), *pairs]:
            target[:] = source

    def _to_rails(self) -> Bytes:
        """Return the source in rail order."""
        by_rail = np.empty_like(self._source)
        by_host, pairs = self._host_order(self._source)
        for target, source in [*pairs, *self._parts(by_rail, by_host)]:
            target[:] = source
        return by_rail
