"""The flight record of all ranks in a file: written where RINGCOMM_DUMP points, once for a failure, by the first rank
that gets its error. A rank that did not answer that one, as it was in no call, adds its own calls once it gets it.
"""

import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from ringcomm.config import dump_folder
from ringcomm.errors import ArgumentError, CollectiveTimeout, MismatchError, PeerLost, RingcommError
from ringcomm.native import lib
from ringcomm.trace.flight_files import SUFFIX, VERSION, Record, key_of, read_flight
from ringcomm.trace.recorder import group_id

__all__ = ["dump_if_asked"]

log = logging.getLogger("ringcomm")

CALLS = 100  # of each rank


class _Group(Protocol):
    """What this needs of a transport."""

    rank: int
    size: int
    handle: Any

    def rank_reports(self, calls: int) -> list[Record]: ...


def dump_if_asked(groups: Iterable[_Group], error: RingcommError) -> None:
    """Write the record of the groups of this process, for an error that another rank may have caused."""
    folder = dump_folder()
    if not folder or not isinstance(error, (CollectiveTimeout, PeerLost, MismatchError)):
        return
    try:
        _dump(Path(folder), [*groups], error)
    except (OSError, ArgumentError) as reason:  # the error matters more
        _warn_once(folder, getattr(reason, "strerror", None) or str(reason))


@cache
def _warn_once(folder: str, reason: str) -> None:
    log.warning("cannot write a flight record to %s, where RINGCOMM_DUMP points: %s", folder, reason)


def _dump(folder: Path, groups: list[_Group], error: RingcommError) -> None:
    found: list[Record] = []
    # First the group that the error has broken. A mismatch breaks none, and may be one of several.
    groups.sort(key=lambda each: (lib.rc_check(each.handle) == lib.RC_OK, -each.size))
    for group in groups:
        with suppress(RingcommError):  # closed
            about = {"group": group_id(group.handle), "seen_by": group.rank}
            found += [about | each for each in group.rank_reports(CALLS)]
    if not found:
        return
    kind = type(error).__name__
    name = f"{found[0]['group']}-{kind}" + (f"-{error.epoch or 0}" if isinstance(error, MismatchError) else "")
    path = folder / f"{name}{SUFFIX}"
    head = {"version": VERSION, "kind": kind, "error": str(error)}
    from ringcomm.machine.files import create_atomic

    if not create_atomic(path, "\n".join(map(json.dumps, [head, *found])).encode()):
        _add_own(path, found)


def _add_own(path: Path, found: list[Record]) -> None:
    """Add what this rank did to the groups of a record that lack it."""
    lacking = {key_of(record) for record in read_flight(path).records if not record["answered"]}
    for record in found:
        if record["rank"] == record["seen_by"] and key_of(record) in lacking:
            line = f"\n{json.dumps(record)}".encode()
            with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW), "ab", 0) as file:
                file.write(line)  # at once, as another rank may add its own
