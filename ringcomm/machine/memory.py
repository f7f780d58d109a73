"""How much more memory this process may use: shared memory beyond that ends in SIGBUS or an OOM kill."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ringcomm.errors import MemoryShortage
from ringcomm.machine.cgroup import groups, words
from ringcomm.machine.limits import soft_limit

__all__ = ["UNKNOWN", "Headroom", "addresses", "available", "mib", "require"]


class Headroom(NamedTuple):
    """The bytes that one limit leaves, and the name of the limit."""

    bytes: int
    limit: str


UNKNOWN = Headroom(sys.maxsize, "no limit is known, since /proc shows no figures")


def require(bytes: int, what: str) -> None:  # noqa: A002 (the unit)
    """Raise MemoryShortage, with current figures, unless `bytes` more are available for `what`."""
    tightest = available()
    if bytes > tightest.bytes:
        raise MemoryShortage(
            f"{what} needs {mib(bytes)}, but only {mib(tightest.bytes)} are available: {tightest.limit}",
            expected=bytes,
            got=tightest.bytes,
        )


def available(root: Path = Path("/")) -> Headroom:
    """Return the tightest of all known limits on this process; without /proc there may be none."""
    return min([*_groups(root), *_machine(root), *_process(root)], default=UNKNOWN)


def addresses() -> int:
    """Return how large a range of addresses is worth reserving for memory that is taken as it is needed.

    Twice the memory of this machine, because freed blocks of many sizes leave gaps; 0 where the range itself counts
    against a limit on this process.
    """
    if any(soft_limit(kind) is not None for kind in ("RLIMIT_AS", "RLIMIT_FSIZE")):
        return 0
    return 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def mib(bytes: int) -> str:  # noqa: A002 (the unit)
    return f"{bytes / (1 << 20):,.1f} MiB"


def _groups(root: Path) -> Iterator[Headroom]:
    for folder, unified in groups("memory", root):
        names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (words(folder / name) for name in names)
        if limit and used and limit[0].isdecimal():
            # The kernel reclaims inactive file pages before it refuses memory.
            statistics = words(folder / "memory.stat")
            inactive = "inactive_file" if unified else "total_inactive_file"
            reclaimable = int(statistics[statistics.index(inactive) + 1]) if inactive in statistics else 0
            yield _left(int(limit[0]), int(used[0]) - reclaimable, f"{names[0]} of {folder}")


def _machine(root: Path) -> Iterator[Headroom]:
    meminfo = words(root / "proc/meminfo")
    if "MemAvailable:" in meminfo:
        yield Headroom(int(meminfo[meminfo.index("MemAvailable:") + 1]) << 10, "MemAvailable of this machine")


def _process(root: Path) -> Iterator[Headroom]:
    space = soft_limit("RLIMIT_AS")
    pages = words(root / "proc/self/statm")
    if space is not None and pages:
        yield _left(space, int(pages[0]) * os.sysconf("SC_PAGE_SIZE"), "RLIMIT_AS")
    length = soft_limit("RLIMIT_FSIZE")
    if length is not None:
        yield Headroom(length, "RLIMIT_FSIZE (shared memory is a file)")


def _left(limit: int, used: int, name: str) -> Headroom:
    return Headroom(max(0, limit - used), f"{name} is {mib(limit)}, of which {mib(used)} are in use")
