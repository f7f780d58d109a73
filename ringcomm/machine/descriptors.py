"""The limit on the file descriptors of this process, which a start with many ranks may reach."""

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

from ringcomm.errors import RingcommError
from ringcomm.machine.limits import limits, soft_limit

__all__ = ["exhausted", "name", "provide", "provide_connections", "provide_for_launcher", "raise_limit"]

log = logging.getLogger("ringcomm")

# A rank holds two pidfds for each other rank; rank 0 also two connections while it starts.
ON_RANK_0, ELSEWHERE = 4, 2
SPARE = 32  # for what else the program opens meanwhile
# A launcher holds the ends of two pipes for each rank, and serves two connections of it.
PER_LAUNCHED, LAUNCHER_SPARE = 4, 16

_lock = threading.Lock()  # ranks that are threads must not undo each other's raise


def provide(rank: int, size: int, members: Sequence[int] = ()) -> None:
    """Raise the soft limit, where needed, to what a start as this rank takes.

    Raises RingcommError, with the figures, if the hard limit is lower. `members`: the rank in the job of each rank, by
    which the error names this one; empty if they are all ranks of the job.
    """
    number, of = (members[rank], "") if members else (rank, f" of {size}")
    _provide((ELSEWHERE if rank else ON_RANK_0) * size + SPARE, f"rank {number}{of}", number)


def provide_connections(rank: int, count: int) -> None:
    """Do the same for connections of this rank to others, before it opens so many."""
    _provide(count + SPARE, f"rank {rank}", rank)


def raise_limit() -> bool:
    """Raise the soft limit of a process that has reached it, and return whether the hard limit allows that."""
    import resource  # POSIX only; importing ringcomm works everywhere

    with _lock, suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raised = soft + SPARE if hard == resource.RLIM_INFINITY else min(soft + SPARE, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        return raised > soft
    return False


def provide_for_launcher(size: int) -> None:
    """Do the same for a process that starts so many ranks."""
    _provide(PER_LAUNCHED * size + LAUNCHER_SPARE, f"the launcher of {size} ranks", None)


def _provide(count: int, who: str, rank: int | None) -> None:
    import resource  # POSIX only; importing ringcomm works everywhere

    opened = _opened()
    needed = opened + count
    with _lock:
        found = limits("RLIMIT_NOFILE")
        if found is None:
            return _not_raised(who, needed, rank, "getrlimit")
        soft, hard = found
        if soft == resource.RLIM_INFINITY or needed <= soft:
            return None
        if hard == resource.RLIM_INFINITY or needed <= hard:
            try:
                return resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            except (OSError, ValueError):  # EPERM is a ValueError
                return _not_raised(who, needed, rank, "setrlimit")
    text = f"{who} needs {needed} file descriptors ({opened} are open), but its hard limit is {hard}"
    raise RingcommError(f"{text}: raise it (RLIMIT_NOFILE, ulimit -Hn)", rank=rank, expected=needed, got=hard)


def _not_raised(who: str, needed: int, rank: int | None, call: str) -> None:
    """Go on: the limit may suffice, and `exhausted` names it if not. The launcher says so for all its ranks."""
    level = logging.WARNING if rank is None else logging.INFO
    text = "%s needs %d file descriptors, but the system denies %s: ulimit -n must allow them"
    log.log(level, text, who, needed, call)


def name(rank: int | None) -> str:
    return "this process" if rank is None else f"rank {rank}"


def exhausted(rank: int | None, purpose: str, cause: OSError | None = None) -> RingcommError:
    """Return the error for a rank, or a launcher, that has no descriptor left for `purpose`.

    `cause` may blame the whole machine.
    """
    limit = soft_limit("RLIMIT_NOFILE")
    blamed = f" ({cause.strerror})" if cause else ""
    known = "unknown" if limit is None else limit
    return RingcommError(
        f"{name(rank)} has no file descriptor left {purpose}{blamed}: its limit (RLIMIT_NOFILE) is {known}, and "
        f"it needs {ELSEWHERE} for each rank ({ON_RANK_0} on the first of a host) besides those that the program "
        "opens: raise it (ulimit -n)",
        rank=rank,
    )


def _opened() -> int:
    with suppress(OSError):  # no /proc, or no descriptor to read it
        return len(os.listdir("/proc/self/fd"))
    return 0
