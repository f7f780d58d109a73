"""Timeout errors that name the missing ranks."""

from collections.abc import Collection

from ringcomm.errors import CollectiveTimeout

__all__ = ["arrival_timeout", "connection_timeout", "format_ranks", "key_timeout"]


def format_ranks(numbers: Collection[int], member: str = "rank") -> str:
    """Return "rank 2", "ranks 2 and 3" or "ranks 1, 2 and 5"."""
    *first, last = map(str, sorted(numbers))
    return f"{member}s {', '.join(first)} and {last}" if first else f"{member} {last}"


def arrival_timeout(absent: Collection[int], size: int, timeout: float, member: str = "rank") -> CollectiveTimeout:
    """Return the error that names the members that did not join; they are its `got`."""
    text = f"{format_ranks(absent, member)} of {size} did not arrive within {timeout:g} s"
    return CollectiveTimeout(text, rank=min(absent) if member == "rank" else None, got=sorted(absent))


def connection_timeout(
    missing: Collection[int], rank: int, size: int, timeout: float, reasons: str = ""
) -> CollectiveTimeout:
    """Return the error that names the ranks to which `rank` has no connection."""
    text = f"{format_ranks(missing)} of {size} did not connect to rank {rank} within {timeout:g} s"
    return CollectiveTimeout(text + reasons, rank=min(missing), got=sorted(missing))


def key_timeout(key: str, timeout: float) -> CollectiveTimeout:
    return CollectiveTimeout(f"no rank has set {key!r} within {timeout:g} s")
