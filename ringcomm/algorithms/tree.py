"""The binomial tree: the ranks are halved recursively, and one rank of each half represents it.

Halves are consecutive ranks, whatever the root, so that a gather or scatter moves one contiguous block per half. With
root 0 and a power of two ranks it is the textbook binomial tree.

Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience", Concurrency
and Computation: Practice and Experience 19 (2007).
"""

from typing import NamedTuple

from ringcomm.algorithms import closed_forms
from ringcomm.algorithms.schedule import Block, Port, algorithm, joined

__all__ = ["broadcast", "gather", "reduce", "scatter"]


class Branch(NamedTuple):
    """An edge of the tree: `child` represents the ranks from `begin` to `end`."""

    parent: int
    child: int
    begin: int
    end: int


@algorithm("tree", "broadcast", steps="ceil(log2(n))", sent="S * ceil(log2(n))", rounds=closed_forms.tree)
def broadcast(port: Port, data: Block, root: int) -> None:
    """Each rank that has the array sends it to one rank of the half that has not.

    On 5 ranks, 0 → 3; then 0 → 2 and 3 → 4; then 0 → 1. Fewest steps: best for short arrays.
    """
    for branch in _branches(port, root):
        if branch.child == port.rank:
            port.recv(data, branch.parent)
        else:
            port.send(data, branch.child)


@algorithm(
    "tree",
    "reduce",
    steps="ceil(log2(n))",
    sent="S",
    scratch="S if n > 3 else 0",
    rounds=closed_forms.reducing_tree,
)
def reduce(port: Port, data: Block, out: Block, root: int) -> None:
    """The reverse of a broadcast: a rank adds the sums of its children to its own array, and sends the total on.

    On 5 ranks, 1 → 0; then 2 → 0 and 4 → 3; then 3 → 0.
    """
    branches = _branches(port, root)
    is_leaf = port.rank != root and len(branches) == 1
    space = out if port.rank == root else port.scratch(0 if is_leaf else data.length)
    sums = data
    for branch in reversed(branches):
        if branch.child == port.rank:
            port.send(sums, branch.parent)
        else:
            port.recv(space, branch.child, operand=sums)
            sums = space


@algorithm(
    "tree",
    "gather",
    steps="ceil(log2(n))",
    sent="S / n * (n // 2)",
    scratch="S / n * (n // 2) if n > 3 else 0",
    rounds=closed_forms.tree_blocks,
)
def gather(port: Port, data: Block, blocks: list[Block], root: int) -> None:
    """A rank collects the blocks of the ranks that it represents, and sends them on as one block.

    On 5 ranks, 1 → 0; then 2 → 0 and 4 → 3; then 3 → 0 with blocks 3 and 4.
    """
    branches = _branches(port, root)
    if port.rank != root:
        blocks = _held(port, data, blocks, branches[0])
        port.copy(data, blocks[port.rank])
    for branch in reversed(branches):
        subtree = joined(blocks[branch.begin : branch.end])
        if branch.child == port.rank:
            port.send(subtree, branch.parent)
        else:
            port.recv(subtree, branch.child)


@algorithm(
    "tree",
    "scatter",
    steps="ceil(log2(n))",
    sent="S - S / n",
    scratch="S / n * (n // 2) if n > 3 else 0",
    rounds=closed_forms.tree_blocks,
)
def scatter(port: Port, blocks: list[Block], out: Block, root: int) -> None:
    """The reverse of a gather: a rank gets the blocks of the ranks that it represents, and forwards all but its own.

    On 5 ranks, 0 → 3 with blocks 3 and 4; then 0 → 2 and 3 → 4; then 0 → 1.
    """
    branches = _branches(port, root)
    if port.rank != root:
        blocks = _held(port, out, blocks, branches[0])
    for branch in branches:
        subtree = joined(blocks[branch.begin : branch.end])
        if branch.child == port.rank:
            port.recv(subtree, branch.parent)
        else:
            port.send(subtree, branch.child)
    if port.rank != root:
        port.copy(blocks[port.rank], out)


def _branches(port: Port, root: int) -> list[Branch]:
    """Return the branches of this rank: to its parent, then to its children.

    The parent is always in the larger half, so that every root has the same number of children; the first rank of the
    other half is its child.
    """
    branches = []
    begin, end, parent = 0, port.size, root
    while end - begin > 1:
        larger = (end - begin + 1) // 2
        if parent < begin + larger:
            near, far = (begin, begin + larger), (begin + larger, end)
        else:
            near, far = (end - larger, end), (begin, end - larger)
        child = far[0]
        if port.rank in (parent, child):
            branches.append(Branch(parent, child, *far))
        is_far = far[0] <= port.rank < far[1]
        begin, end = far if is_far else near
        parent = child if is_far else parent
    return branches


def _held(port: Port, own: Block, blocks: list[Block], branch: Branch) -> list[Block]:
    """Return `blocks`, with own memory in place of those of the ranks that this rank represents."""
    lengths = [block.length for block in blocks[branch.begin : branch.end]]
    space = [own] if len(lengths) == 1 else port.scratch(sum(lengths)).split(lengths)
    return [*blocks[: branch.begin], *space, *blocks[branch.end :]]
