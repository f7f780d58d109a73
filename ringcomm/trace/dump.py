"""The flight record of all ranks in a file: written where RINGCOMM_DUMP points, once for a failure, by the first rank
that gets its error."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ringcomm.config import dump_folder
from ringcomm.errors import CollectiveTimeout, MismatchError, PeerLost, RingcommError, refuse
from ringcomm.native import check, ffi, lib
from ringcomm.trace.waiting import explain

__all__ = ["describe", "dump_if_asked"]

VERSION = 1
SUFFIX = ".flight"
CALLS = 100  # of each rank
WAITS = re.compile(r"running for [\d.]+ s, waits for rank (\d+)$")


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
    with suppress(OSError):  # the error matters more
        _dump(Path(folder), [*groups], error)


def _dump(folder: Path, groups: list[_Group], error: RingcommError) -> None:
    found, number = [], ffi.new("uint64_t *")
    for group in sorted(groups, key=lambda each: -each.size):
        with suppress(RingcommError):  # closed
            check(lib.rc_group_id(group.handle, number))
            found.append({"group": f"{number[0]:016x}", "rank": group.rank, "report": group.report(CALLS)})
    if not found:
        return
    kind = type(error).__name__
    folder.mkdir(parents=True, exist_ok=True)
    with (
        suppress(FileExistsError),
        open(folder / f"{found[0]['group']}-{kind}-{error.epoch or 0}{SUFFIX}", "x") as file,
    ):
        json.dump({"version": VERSION, "error": f"{kind}: {error}", "groups": found}, file)


def describe(file: Path) -> str:
    """Return the text of a file: the error, who waits for whom, and the last calls of every rank, the latest first.

    Raises ArgumentError if it is none.
    """
    try:
        record = json.loads(file.read_text())
        if record["version"] != VERSION:
            raise refuse(f"version of {file}", VERSION, record["version"])
    except (ValueError, KeyError, TypeError):
        raise refuse("file", "a flight record, as RINGCOMM_DUMP makes", str(file)) from None
    lines = [record["error"]]
    for group in record["groups"]:
        lines += ["", *_group(group["report"].splitlines(), f"group {group['group']}, seen by rank {group['rank']}")]
    return "\n".join(lines) + "\n"


def _group(report: list[str], title: str) -> Iterator[str]:
    yield title
    waits = {
        rank: int(found[1])
        for rank, line in enumerate(report)
        for part in line.split(";")
        if (found := WAITS.search(part))
    }
    yield from (f"  {line}" for line in explain(waits))
    for line in report:
        rank, _, calls = line.partition(": ")
        yield f"  {rank}"
        yield from (f"    {call.strip()}" for call in calls.split(";"))
