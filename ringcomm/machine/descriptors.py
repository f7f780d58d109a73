"""The limit on the file descriptors of this process, which a start with many ranks may reach."""

import os
from contextlib import suppress

from ringcomm.errors import RingcommError

__all__ = ["exhausted", "provide"]

# A rank holds two pidfds for each other rank; rank 0 also two connections while it starts.
ON_RANK_0, ELSEWHERE = 4, 2
SPARE = 32  # for what else the program opens meanwhile


def provide(rank: int, size: int) -> None:
    """Raise the soft limit, where needed, to what a start as this rank takes.

    Raises RingcommError, with the figures, if the hard limit is lower.
    """
    import resource  # POSIX only; importing ringcomm works everywhere

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _opened() + (ELSEWHERE if rank else ON_RANK_0) * size + SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        text = f"rank {rank} of {size} needs {needed} file descriptors ({_opened()} are open), but its hard limit is "
        raise RingcommError(f"{text}{hard}: raise it (RLIMIT_NOFILE, ulimit -Hn)", rank=rank, expected=needed, got=hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def exhausted(purpose: str, cause: OSError | None = None) -> RingcommError:
    """Return the error for a process that has no descriptor left for `purpose`; `cause` may blame the whole machine."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    blamed = f" ({cause.strerror})" if cause else ""
    return RingcommError(
        f"no file descriptor is left {purpose}{blamed}: the limit of this process (RLIMIT_NOFILE) is {limit}, and "
        f"rank 0 needs {ON_RANK_0} for each rank besides those that the program opens: raise it (ulimit -n)"
    )


def _opened() -> int:
    with suppress(OSError):  # no /proc, or no descriptor to read it
        return len(os.listdir("/proc/self/fd"))
    return 0
