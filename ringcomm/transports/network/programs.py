"""Programs: what one rank does in a large collective of ranks on several hosts, step by step.

A collective has three stages: one inside each host, which gives every rail an equal slice of the data; the collective
itself between the hosts, on all rails at once, by the schedule of an algorithm; and one inside each host, which joins
the slices.

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
load. In an all_to_all the blocks for other hosts go straight to their ranks. A collective without stages runs its
algorithm among all ranks.

The stages of large arrays overlap, in chunks.
"""

from itertools import accumulate, pairwise

from ringcomm.algorithms import pairwise as pairwise_algorithm
from ringcomm.algorithms.schedule import Block, Lengths, even
from ringcomm.algorithms.select import AlgorithmSelector
from ringcomm.errors import RingcommError
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.network.host_layout import HostLayout
from ringcomm.transports.network.program_recorder import Counts, ProgramRecorder
from ringcomm.transports.network.steps import Program
from ringcomm.types import WHOLE

__all__ = ["CollectivePrograms", "program_of"]


def program_of(hosts: HostLayout, call: Blockwise, in_place: bool, selector: AlgorithmSelector) -> Program:
    """Return this rank's program. Peers are ranks of the group."""
    recorder = CollectivePrograms(hosts, call, in_place, selector)
    if max(map(len, hosts.ranks)) > 1 and hasattr(recorder, call.name):
        recorder.in_stages()
    else:
        recorder.among_ranks()
    return Program(tuple(recorder.steps), recorder.scratch, recorder.algorithm)


def overlaps(which: int, counts: Counts, others: Counts) -> list[int]:
    """Return how many elements of one block lie in each of the other blocks; both divide the same array."""
    first, last = list(pairwise(accumulate(counts, initial=0)))[which]
    return [max(0, min(last, end) - max(first, begin)) for begin, end in pairwise(accumulate(others, initial=0))]


class CollectivePrograms(ProgramRecorder):
    """A method of the name of a collective records its stages where hosts have several ranks."""

    def in_stages(self) -> None:
        """Record the stages of the collective of the call."""
        stages = getattr(self, self._call.name, None)
        if stages is None:
            raise RingcommError(f"{self._call.name} has no stages between hosts with several ranks")
        stages()

    def among_ranks(self) -> None:
        """Run the algorithm among all ranks, wherever they run."""
        call, size = self._call, self._call.n
        counted = call.recv_rows is not call.rows
        rows = even(call.count, size) if call.name in WHOLE else tuple(call.rows)
        lengths = Lengths(rows, tuple(call.recv_rows) if counted else ())
        algorithm = self._selector.of(call.name, size, lengths, call.item)
        self.algorithm = algorithm.name
        self._run(algorithm, self._source, self._target, lengths, range(size), call.me, call.root)

    # --- Arrays of one shape on all ranks -----------------------------------------------------------------------------

    def all_reduce(self) -> None:
        for source, target in self._chunks(self._source, self._target):
            slices, mine = self._slice(target)
            self._inside("reduce_scatter", source, mine, slices)
            self._between("all_reduce", mine, mine)
            self._inside("all_gather", mine, target, slices)

    def reduce(self) -> None:
        for source, sums, target in self._chunks(self._source, self._empty([self._call.count]), self._target):
            slices, mine = self._slice(sums)
            self._inside("reduce_scatter", source, mine, slices)
            self._between("reduce", mine, mine, root=self._root_host)
            if self._on_root_host:
                self._inside("gather", mine, target, slices, self._root_local_rank)

    def broadcast(self) -> None:
        for (array,) in self._chunks(self._target):
            slices, mine = self._slice(array)
            if self._on_root_host:
                self._inside("broadcast", array, array, root=self._root_local_rank)
            self._between("broadcast", mine, mine, root=self._root_host)
            if not self._on_root_host:
                self._inside("all_gather", mine, array, slices)

    # --- Blocks of the ranks ------------------------------------------------------------------------------------------

    def all_gather(self) -> None:
        mine = self._to_slices()
        joined = self._empty(self._rail_counts())
        self._between("all_gather", mine, joined, self._rail_counts())
        rails = self._empty(self._rail_totals())
        self._inside("all_gather", joined, rails, self._rail_totals())
        self._to_ranks(rails)

    def gather(self) -> None:
        mine = self._to_slices()
        joined = self._empty(self._rail_counts() if self._on_root_host else [])
        self._between("gather", mine, joined, self._rail_counts(), self._root_host)
        if self._on_root_host:
            is_root = self._hosts.local_rank == self._root_local_rank
            rails = self._empty(self._rail_totals() if is_root else [])
            self._inside("gather", joined, rails, self._rail_totals(), self._root_local_rank)
            if is_root:
                self._to_ranks(rails)

    def scatter(self) -> None:
        joined = self._empty([])
        if self._on_root_host:
            is_root = self._hosts.local_rank == self._root_local_rank
            rails = self._to_rails() if is_root else joined
            joined = self._empty(self._rail_counts())
            self._inside("scatter", rails, joined, self._rail_totals(), self._root_local_rank)
        mine = self._empty([self._rail_counts()[self._hosts.host]])
        self._between("scatter", joined, mine, self._rail_counts(), self._root_host)
        self._from_slices(mine)

    def reduce_scatter(self) -> None:
        joined = self._empty(self._rail_counts())
        self._inside("reduce_scatter", self._to_rails(), joined, self._rail_totals())
        mine = self._empty([self._rail_counts()[self._hosts.host]])
        self._between("reduce_scatter", joined, mine, self._rail_counts())
        self._from_slices(mine)

    def all_to_all(self) -> None:
        call, local = self._call, self._hosts.local_ranks
        sent, received = ([rows[rank] for rank in local] for rows in (call.rows, call.recv_rows))
        outgoing = self._source.split(call.rows)
        mine, theirs = self._empty(sent), self._empty(received)
        for rank, block in zip(local, mine.split(sent), strict=True):
            self._copy(outgoing[rank], block)
        self._inside("all_to_all", mine, theirs, [*sent, *received])
        lengths = Lengths(tuple(call.rows), tuple(call.recv_rows))
        ranks = range(sum(map(len, self._hosts.ranks)))
        self.algorithm = pairwise_algorithm.all_to_all.name
        self._run(pairwise_algorithm.all_to_all, self._source, self._target, lengths, ranks, call.me, 0, local)
        incoming = self._target.split(call.recv_rows)
        for rank, block in zip(local, theirs.split(received), strict=True):
            self._copy(block, incoming[rank])

    # --- Slices -------------------------------------------------------------------------------------------------------

    def _slice(self, data: Block) -> tuple[list[int], Block]:
        slices = self._hosts.slices(data.length)
        return slices, data.split(slices)[self._hosts.local_rank]

    def _rail_counts(self, rail: int | None = None) -> list[int]:
        """Return the elements of each host on a rail, by default this rank's; zeros for a rank without a rail."""
        rail, rails = self._hosts.local_rank if rail is None else rail, self._hosts.rails
        totals = [sum(self._call.rows[rank] for rank in ranks) for ranks in self._hosts.ranks]
        return [even(total, rails)[rail] if rail < rails else 0 for total in totals]

    def _rail_totals(self) -> list[int]:
        """Return the elements on the rail of each rank of this host."""
        return [sum(self._rail_counts(rail)) for rail in range(len(self._hosts.local_ranks))]

    def _local_blocks_and_slices(self) -> tuple[list[int], list[int]]:
        """Return the elements of this host's data as blocks of its ranks, and as slices of the rails."""
        blocks = [self._call.rows[rank] for rank in self._hosts.local_ranks]
        return blocks, self._hosts.slices(sum(blocks))

    def _to_slices(self) -> Block:
        """Turn the blocks of this host's ranks into slices for its rails."""
        (blocks, slices), local_rank = self._local_blocks_and_slices(), self._hosts.local_rank
        mine = self._empty([slices[local_rank]])
        counts = [*overlaps(local_rank, blocks, slices), *overlaps(local_rank, slices, blocks)]
        self._inside("all_to_all", self._source, mine, counts)
        return mine

    def _from_slices(self, mine: Block) -> None:
        """Turn the slices of the rails into the blocks of this host's ranks."""
        (blocks, slices), local_rank = self._local_blocks_and_slices(), self._hosts.local_rank
        counts = [*overlaps(local_rank, slices, blocks), *overlaps(local_rank, blocks, slices)]
        self._inside("all_to_all", mine, self._target, counts)

    def _parts(self, by_rail: Block, by_host: Block) -> list[tuple[Block, Block]]:
        """Return the pairs of corresponding parts of all data in rail order and in host order."""
        rails, hosts = range(self._hosts.rails), range(len(self._hosts.ranks))
        table = [self._rail_counts(rail) for rail in rails]
        on_rails = by_rail.split([table[rail][host] for rail in rails for host in hosts])
        on_hosts = by_host.split([table[rail][host] for host in hosts for rail in rails])
        return [
            (on_rails[rail * len(hosts) + host], on_hosts[host * len(rails) + rail]) for rail in rails for host in hosts
        ]

    def _host_order(self, data: Block) -> tuple[Block, list[tuple[Block, Block]]]:
        """Return memory for the blocks of all ranks in host order, and the pairs of its blocks and those of `data`."""
        order = [rank for ranks in self._hosts.ranks for rank in ranks]
        if order == sorted(order):
            return data, []
        memory = self._empty([data.length])
        blocks = data.split(self._call.rows)
        ordered = memory.split([self._call.rows[rank] for rank in order])
        return memory, [(block, blocks[rank]) for block, rank in zip(ordered, order, strict=True)]

    def _to_ranks(self, by_rail: Block) -> None:
        """Write all data, given in rail order, to the target."""
        by_host, pairs = self._host_order(self._target)
        for source, target in [*self._parts(by_rail, by_host), *pairs]:
            self._copy(source, target)

    def _to_rails(self) -> Block:
        """Return the source in rail order."""
        by_rail = self._empty([self._source.length])
        by_host, pairs = self._host_order(self._source)
        for target, source in [*pairs, *self._parts(by_rail, by_host)]:
            self._copy(source, target)
        return by_rail
