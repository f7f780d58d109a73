"""The steps of a program, and how the stages of several chunks overlap."""

from collections.abc import Sequence
from typing import NamedTuple

from ringcomm.algorithms.schedule import Block, Copy, Exchange

__all__ = ["HostCollective", "Program", "RailCollective", "Stages", "Step", "pipelined"]


class HostCollective(NamedTuple):
    """A collective of the ranks of this host. `count` is as in rc_call."""

    collective: str
    source: Block
    target: Block
    count: int  # type: ignore[assignment]  # in place of tuple.count
    counts: tuple[int, ...]  # empty: equal blocks
    root: int
    overlaps: bool = False  # it runs while the exchange before it is in flight


class RailCollective(NamedTuple):
    """A collective of this rank's rail, between hosts: a step of programs for arrays on GPUs."""

    collective: str
    source: Block
    target: Block
    count: int  # type: ignore[assignment]  # in place of tuple.count
    counts: tuple[int, ...]
    root: int


Step = Exchange | Copy | HostCollective | RailCollective


class Program(NamedTuple):
    """The steps of one rank, the elements of scratch memory that they need, and the algorithm between hosts."""

    steps: tuple[Step, ...]
    scratch: int
    algorithm: str


class Stages(NamedTuple):
    """The steps of a chunk: inside the host, between the hosts, and inside the host again."""

    to_rails: Sequence[Step]
    between: Sequence[Step]
    from_rails: Sequence[Step]


def pipelined(chunks: Sequence[Stages]) -> list[Step]:
    """Return the steps of all chunks.

    During the first exchange of a chunk the next chunk goes to the rails; during the last one the chunk before comes
    from the rails. All ranks of a host have these in the same order.
    """
    steps = [*chunks[0].to_rails]
    for i, chunk in enumerate(chunks):
        later = _overlapping(chunks[i + 1].to_rails) if i + 1 < len(chunks) else []
        earlier = _overlapping(chunks[i - 1].from_rails) if i else []
        ends = [k for k, step in enumerate(chunk.between, 1) if isinstance(step, Exchange)] or [len(chunk.between)]
        first, last = ends[0], ends[-1]
        steps += [*chunk.between[:first], *later, *chunk.between[first:last], *earlier, *chunk.between[last:]]
    return [*steps, *chunks[-1].from_rails]


def _overlapping(steps: Sequence[Step]) -> list[Step]:
    return [step._replace(overlaps=True) if isinstance(step, HostCollective) else step for step in steps]
