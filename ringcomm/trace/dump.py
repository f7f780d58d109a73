"""The flight record of all ranks in a file: written where RINGCOMM_DUMP points, once for a failure, by the first rank
that gets its error. A rank that did not answer that one, as it was in no call, adds a line of its own once it gets it.

The first line of a file is the record, and each further one what a rank has added, both as JSON.
"""

import json
import logging
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from ringcomm.config import dump_folder
from ringcomm.errors import ArgumentError, CollectiveTimeout, MismatchError, PeerLost, RingcommError, refuse
from ringcomm.machine.files import create_atomic
from ringcomm.native import lib
from ringcomm.trace.recorder import group_id
from ringcomm.trace.waiting import explain

__all__ = ["describe", "dump_if_asked"]

log = logging.getLogger("ringcomm")

VERSION = 1
SUFFIX = ".flight"
CALLS = 100  # of each rank
NO_ANSWER = ": no answer"  # as in NetworkGroup::report
WAITS = re.compile(r"^rank (\d+):.*, waits for rank (\d+)", re.MULTILINE)


class _Group(Protocol):
    """What this needs of a transport."""

    rank: int
    size: int
    handle: Any

    def report(self, calls: int) -> str: ...


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
    found = []
    # First the group that the error has broken. A mismatch breaks none, and may be one of several.
    groups.sort(key=lambda each: (lib.rc_check(each.handle) == lib.RC_OK, -each.size))
    for group in groups:
        with suppress(RingcommError):  # closed
            found.append({"group": group_id(group.handle), "rank": group.rank, "report": group.report(CALLS)})
    if not found:
        return
    kind = type(error).__name__
    name = f"{found[0]['group']}-{kind}" + (f"-{error.epoch or 0}" if isinstance(error, MismatchError) else "")
    path = folder / f"{name}{SUFFIX}"
    record = json.dumps({"version": VERSION, "error": f"{kind}: {error}", "groups": found}).encode()
    if not create_atomic(path, record):
        _add_own(path, found)


def _add_own(path: Path, found: list[dict[str, Any]]) -> None:
    """Add what this rank did to the groups of a record that lack it."""
    reports = {group["group"]: group["report"].splitlines() for group in _read(path)["groups"]}
    for each in found:
        rank = f"rank {each['rank']}"
        own = re.search(f"^{rank}:(.*)", each["report"], re.MULTILINE)
        if own and rank + NO_ANSWER in reports.get(each["group"], []):
            line = json.dumps({"group": each["group"], "rank": rank, "calls": own[1]})
            with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW), "ab", 0) as file:
                file.write(f"\n{line}".encode())  # at once, as another rank may add its own


def _read(file: Path) -> dict[str, Any]:
    """Return a record, with what ranks have added to it. Raises ArgumentError if the file is none."""
    try:
        first, *added = file.read_text().splitlines()
        record: dict[str, Any] = json.loads(first)
        if record["version"] != VERSION:
            raise refuse(f"version of {file}", VERSION, record["version"])
    except (ValueError, KeyError, TypeError):
        raise refuse("file", "a flight record, as RINGCOMM_DUMP makes", str(file)) from None
    for line in added:
        with suppress(ValueError):  # half written, on a full disk
            own = json.loads(line)
            missing = own["rank"] + NO_ANSWER
            for group in record["groups"]:
                if group["group"] == own["group"]:
                    group["report"] = group["report"].replace(missing, f"{missing} at first;{own['calls']}")
    return record


def describe(file: Path) -> str:
    """Return the text of a file: the error, who waits for whom, and the last calls of every rank, the latest first.

    Raises ArgumentError if it is none.
    """
    record = _read(file)
    told = _explain(record["error"])  # the report in a timeout was made before its error ended the calls of the others
    lines = [record["error"], *told]
    for group in record["groups"]:
        lines += ["", f"group {group['group']}, seen by rank {group['rank']}"]
        lines += [] if told else _explain(group["report"])
        for line in group["report"].splitlines():
            rank, _, calls = line.partition(": ")
            lines += [f"  {rank}", *(f"    {call.strip()}" for call in calls.split(";"))]
    return "\n".join(lines) + "\n"


def _explain(report: str) -> list[str]:
    waits = {int(rank): int(peer) for rank, peer in WAITS.findall(report)}
    return [f"  {line}" for line in explain(waits)]
