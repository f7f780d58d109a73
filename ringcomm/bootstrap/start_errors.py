"""The errors of a start: which ranks are missing, or lost.

A start may connect a part of a job: the ranks of one host, or of a `grow`. `members` has the rank
in the job of each of them, by which all errors name it; it is empty where they are all ranks of the job.
"""

from collections.abc import Collection, Sequence
from itertools import chain

from ringcomm.errors import CollectiveTimeout, PeerLost

__all__ = [
    "FIREWALL",
    "by_rank",
    "format_ranks",
    "lost_in_start",
    "missing_connections",
    "missing_ranks",
    "rank_in_job",
]

FIREWALL = "check that no firewall on the way drops connections to it"


def format_ranks(numbers: Collection[int], member: str = "rank") -> str:
    """Return "rank 2", "ranks 2 and 3" or "ranks 0, 2 and 4-511"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    *first, last = chain.from_iterable([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in runs)
    return f"{member}{'s' * (len(numbers) > 1)} {', '.join(first) + ' and ' if first else ''}{last}"


def by_rank(values: Sequence[str], member: str = "rank", members: Sequence[int] = ()) -> str:
    """Describe which ranks have which value; `members`: their ranks in the job, see above."""
    numbers = members or range(len(values))
    ranks = {value: [n for n, other in zip(numbers, values, strict=True) if other == value] for value in values}
    return "; ".join(f"{value} on {format_ranks(where, member)}" for value, where in ranks.items())


def rank_in_job(members: Sequence[int], rank: int) -> int:
    return members[rank] if members else rank


def missing_ranks(
    absent: Collection[int], size: int, timeout: float, member: str = "rank", members: Sequence[int] = ()
) -> CollectiveTimeout:
    """Return the error that names the missing ranks; they are its `got`."""
    absent = [rank_in_job(members, rank) for rank in absent]
    text = f"{format_ranks(absent, member)}{_of_all(size, members)} did not arrive within {timeout:g} s"
    return CollectiveTimeout(text, rank=min(absent) if member == "rank" else None, got=sorted(absent))


def missing_connections(
    missing: Collection[int], rank: int, size: int, timeout: float, members: Sequence[int] = (), reasons: str = ""
) -> CollectiveTimeout:
    """Return the error that names the ranks to which `rank` has no connection."""
    rank, missing = rank_in_job(members, rank), [rank_in_job(members, other) for other in missing]
    text = f"{format_ranks(missing)}{_of_all(size, members)} did not connect to rank {rank} within {timeout:g} s"
    return CollectiveTimeout(text + reasons, rank=min(missing), got=sorted(missing))


def lost_in_start(rank: int, process: str = "") -> PeerLost:
    return PeerLost(f"rank {rank}{process and f' ({process})'} exited during startup", rank=rank)


def _of_all(size: int, members: Sequence[int]) -> str:
    return f" of {size}" if [*members] in ([], [*range(size)]) else ""
