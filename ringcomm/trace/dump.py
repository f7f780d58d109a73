"""The flight record of all ranks in a file: written where RINGCOMM_DUMP points, once for a failure, by the first rank
that gets its error. A rank that did not answer that one, as it was in no call, adds its own calls once it gets it.

Each line of a file is JSON: first the error, then what a rank of a group does, as rc_report_json writes it.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
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
from ringcomm.transports.core import report

__all__ = ["describe", "dump_if_asked"]

log = logging.getLogger("ringcomm")

VERSION = 2
SUFFIX = ".flight"
CALLS = 100  # of each rank

WAITS = re.compile(r"^rank (\d+):.*, waits for rank (\d+)", re.MULTILINE)  # in the error, made before other calls ended

Record = dict[str, Any]  # a line of a file


class _Group(Protocol):
    """What this needs of a transport."""

    rank: int
    size: int
    handle: Any


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
            lines = report(group.handle, group.size, CALLS, lib.rc_report_json).splitlines()
            found += [about | json.loads(line) for line in lines]
    if not found:
        return
    kind = type(error).__name__
    name = f"{found[0]['group']}-{kind}" + (f"-{error.epoch or 0}" if isinstance(error, MismatchError) else "")
    path = folder / f"{name}{SUFFIX}"
    head = {"version": VERSION, "error": f"{kind}: {error}"}
    if not create_atomic(path, "\n".join(map(json.dumps, [head, *found])).encode()):
        _add_own(path, found)


def _add_own(path: Path, found: list[Record]) -> None:
    """Add what this rank did to the groups of a record that lack it."""
    lacking = {_key(record) for record in _read(path)[1] if not record["answered"]}
    for record in found:
        if record["rank"] == record["seen_by"] and _key(record) in lacking:
            line = f"\n{json.dumps(record)}".encode()
            with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW), "ab", 0) as file:
                file.write(line)  # at once, as another rank may add its own


def _key(record: Record) -> tuple[str, int]:
    return record["group"], record["rank"]


def _read(file: Path) -> tuple[str, list[Record]]:
    """Return the error of a file, and what each rank of each group did. Raises ArgumentError if the file is none."""
    try:
        first, *lines = file.read_text().splitlines()
        head = json.loads(first)
        if head["version"] != VERSION:
            raise refuse(f"version of {file}", VERSION, head["version"])
        error: str = head["error"]
    except (ValueError, KeyError, TypeError):
        raise refuse("file", "a flight record, as RINGCOMM_DUMP makes", str(file)) from None
    found: dict[tuple[str, int], Record] = {}
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):  # half written, on a full disk, or no record
            record = json.loads(line)
            key = _key(record)
            found[key] = record | {"state": "no answer at first"} if key in found else record
    return error, [*found.values()]


def describe(file: Path) -> str:
    """Return the text of a file: the error, who waits for whom, and the last calls of every rank, the latest first.

    Raises ArgumentError if it is none.
    """
    error, records = _read(file)
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["group"], []).append(record)
    told = {int(rank): int(peer) for rank, peer in WAITS.findall(error)}
    lines = [error, *(f"  {line}" for line in explain(told))]
    for group, ranks in groups.items():
        lines += ["", f"group {group}, seen by rank {ranks[0]['seen_by']}"]
        waits = {each["rank"]: peer for each in ranks if (peer := _waited_for(each)) is not None}
        lines += [] if told else [f"  {line}" for line in explain(waits)]
        for each in ranks:
            lines += [f"  rank {each['rank']}", *(f"    {text}" for text in _texts(each))]
    return "\n".join(lines) + "\n"


def _waited_for(record: Record) -> int | None:
    """Return the rank for which one waits in a call, or waited in the last one, if that has failed."""
    running = sum(call["ago"] is None for call in record["calls"])
    return next((call["waits_for"] for call in record["calls"][: running + 1] if call["waits_for"] is not None), None)


def _texts(record: Record) -> Iterator[str]:
    if record["state"]:
        yield record["state"]
    for call in record["calls"]:
        outcome, seconds, ago = call["outcome"], call["seconds"], call["ago"]
        took = f"running for {seconds:.3f} s" if ago is None else f"{outcome} after {seconds:.2f} s, {ago:.3f} s ago"
        yield f"{call['call']}, {took}"
    if record["answered"] and not record["calls"]:
        yield "no call yet"
