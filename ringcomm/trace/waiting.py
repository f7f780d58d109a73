"""Who holds whom up, from the rank for which each one waits."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from ringcomm.bootstrap.start_errors import format_ranks

__all__ = ["explain"]


def explain(waits: Mapping[int, int], does: Mapping[int, str] | None = None) -> Iterator[str]:
    """Yield a line for each rank that does not wait though others wait for it, and for ranks that wait for each other.

    Args:
        waits: for each rank that waits, for which one
        does: what ranks do, to be added
    """
    culprits: dict[int, list[int]] = defaultdict(list)
    for rank, peer in sorted(waits.items()):
        if peer not in waits:
            culprits[peer].append(rank)
    for rank, others in sorted(culprits.items()):
        what = f": {does[rank]}" if does and rank in does else ""
        yield f"{_name(others)} for rank {rank}{what}"
    for ranks in _cycles(waits):
        yield f"{_name(ranks)} for each other"


def _cycles(waits: Mapping[int, int]) -> Iterator[list[int]]:
    seen: set[int] = set()
    for first in sorted(waits):
        path, rank = [], first
        while rank in waits and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = waits[rank]
        if rank in path:
            yield sorted(path[path.index(rank) :])


def _name(ranks: list[int]) -> str:
    return f"{format_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
