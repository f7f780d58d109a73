"""Records the steps of one rank in a call: copies, collectives inside its host, and the schedules of algorithms."""

from collections.abc import Collection, Iterator, Sequence

from ringcomm.algorithms.cost import LinkCost
from ringcomm.algorithms.lockstep import call_layout
from ringcomm.algorithms.schedule import (
    EMPTY,
    IN,
    NO_PEER,
    OUT,
    SCRATCH,
    Algorithm,
    Block,
    Copy,
    Exchange,
    Lengths,
    even,
    record,
)
from ringcomm.algorithms.select import AlgorithmSelector, is_slow
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.network.host_layout import HostLayout
from ringcomm.transports.network.steps import HostCollective, Stages, Step, pipelined
from ringcomm.types import COLLECTIVES

__all__ = ["Counts", "ProgramRecorder", "number_of_chunks"]

Counts = Sequence[int]
# Chunks pay where a rank has time while its host sends. With two ranks on each of two hosts, on two cores, all_reduce
# of 4 and 16 MiB took 6 to 10 % less time over 1 Gbit/s; over an unlimited veth, 64 MiB took up to 20 % more.
MESSAGE_BYTES = 256 << 10  # of a chunk, between two hosts


def number_of_chunks(size: int, rails: int, hosts: int, link: LinkCost) -> int:
    """Return the number of chunks in which an array of `size` bytes travels."""
    return max(1, size // (MESSAGE_BYTES * rails * hosts)) if is_slow(link) else 1


class ProgramRecorder:
    """Records the steps of one rank in one call."""

    def __init__(self, hosts: HostLayout, call: Blockwise, in_place: bool, selector: AlgorithmSelector) -> None:
        self.steps: list[Step] = []
        self.scratch = 0
        self.algorithm = ""
        self._rail_steps = slice(0)  # the steps of the last collective between hosts
        self._hosts, self._call, self._selector = hosts, call, selector
        source_count, target_count = call.counts()
        self._target = Block(OUT, 0, target_count)
        self._source = self._target if in_place and source_count == target_count else Block(IN, 0, source_count)
        self._root_host, self._root_local_rank = hosts.locate(call.root)
        self._on_root_host = hosts.host == self._root_host

    def _empty(self, counts: Counts) -> Block:
        length = sum(counts)
        self.scratch += length
        return Block(SCRATCH, self.scratch - length, self.scratch)

    def _copy(self, source: Block, target: Block) -> None:
        if source != target and source.length:
            self.steps.append(Copy(source, target))

    def _inside(
        self, collective: str, source: Block, target: Block, counts: Counts | None = None, root: int = 0
    ) -> None:
        """Run a collective on the ranks of this host."""
        self.steps.append(HostCollective(*self._arguments(collective, source, target, counts), root))

    @staticmethod
    def _arguments(
        collective: str, source: Block, target: Block, counts: Counts | None
    ) -> tuple[str, Block, Block, int, tuple[int, ...]]:
        """Return the first fields of a HostCollective or RailCollective."""
        row = COLLECTIVES[collective]
        block = source if row.given in ("ARRAY", "BLOCK") else target
        return collective, source, target, 0 if row.exchanges else block.length, tuple(counts or ())

    def _between(
        self, collective: str, source: Block, target: Block, counts: Counts | None = None, root: int = 0
    ) -> None:
        """Run a collective on this rank's rail, if it has one. `root` is a host."""
        rail = self._hosts.rail
        lengths = Lengths(even(source.length, len(self._hosts.ranks)) if counts is None else tuple(counts))
        selector = self._selector.sharing(self._hosts.rails)
        algorithm = selector.of(collective, len(self._hosts.ranks), lengths, self._call.item)
        self.algorithm = algorithm.name
        begin = len(self.steps)
        if rail:
            self._run(algorithm, source, target, lengths, rail, self._hosts.host, root)
        self._rail_steps = slice(begin, len(self.steps))

    def _run(
        self,
        algorithm: Algorithm,
        source: Block,
        target: Block,
        lengths: Lengths,
        ranks: Sequence[int],
        me: int,
        root: int,
        skip: Collection[int] = (),
    ) -> None:
        """Run the schedule of an algorithm among `ranks`; this rank's own data is copied first, as `record` expects."""
        if COLLECTIVES[algorithm.collective].exchanges and source == target:
            source = self._empty([target.length])
            self._copy(target, source)
        own = call_layout(algorithm.collective, me, lengths, root)
        self._copy(source.part(own.source, own.source + own.preset), target.part(own.target, own.target + own.preset))
        schedule = record(algorithm, me, len(ranks), lengths, root).without(skip)
        scratch = self._empty([schedule.scratch])

        def place(block: Block) -> Block:
            if block.begin == block.end:
                return EMPTY
            memory = (source, target, scratch)[block.memory]
            return memory.part(block.begin, block.end)

        def rank(peer: int) -> int:
            return NO_PEER if peer == NO_PEER else ranks[peer]

        for step in schedule.steps:
            if isinstance(step, Copy):
                self._copy(place(step.source), place(step.target))
            else:
                operand = step.operand and place(step.operand)
                self.steps.append(
                    Exchange(rank(step.dest), place(step.outgoing), rank(step.source), place(step.incoming), operand)
                )

    # --- Chunks -------------------------------------------------------------------------------------------------------

    def _chunks(self, *arrays: Block) -> Iterator[tuple[Block, ...]]:
        """Yield the chunks of arrays of the whole call; what is recorded for one overlaps with the others."""
        size, link = self._call.count * self._call.item, self._selector.cluster.inter_node
        number = number_of_chunks(size, self._hosts.rails, len(self._hosts.ranks), link)
        recorded = []
        for chunk in zip(*(array.split(even(array.length, number)) for array in arrays), strict=True):
            self.steps = []
            yield chunk
            between = self._rail_steps
            recorded.append(Stages(self.steps[: between.start], self.steps[between], self.steps[between.stop :]))
        self.steps = pipelined(recorded)
