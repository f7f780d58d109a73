"""The processes of a trace, in the order in which all its pictures show them."""

from collections.abc import Sequence

from ringcomm.trace.entries import Recording

__all__ = ["processes_of"]


def processes_of(recordings: Sequence[Recording]) -> dict[str, Recording]:
    """Return a recording of each process, in the order of ranks of the job, and of their first calls."""
    found: dict[str, Recording] = {}
    for each in recordings:
        found.setdefault(each.process, each)
    return dict(sorted(found.items(), key=lambda item: item[1].job_rank))
