"""The flight record of all ranks in a file: written where RINGCOMM_DUMP points, once for a failure, by the first rank
that gets its error."""

import json
import re
from collections.abc import Iterable
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
    with suppress(OSError):  # the error matters more
        _dump(Path(folder), [*groups], error)


def _dump(folder: Path, groups: list[_Group], error: RingcommError) -> None:
    found, number = [], ffi.new("uint64_t *")
    # First the group that the error has broken. A mismatch breaks none, and may be one of several.
    groups.sort(key=lambda each: (lib.rc_check(each.handle) == lib.RC_OK, -each.size))
    for group in groups:
        with suppress(RingcommError):  # closed
            check(lib.rc_group_id(group.handle, number))
            found.append({"group": f"{number[0]:016x}", "rank": group.rank, "report": group.report(CALLS)})
    if not found:
        return
    kind = type(error).__name__
    name = f"{found[0]['group']}-{kind}" + (f"-{error.epoch or 0}" if isinstance(error, MismatchError) else "")
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), open(folder / f"{name}{SUFFIX}", "x") as file:
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
