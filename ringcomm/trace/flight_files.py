"""The files of flight records. Each line is JSON: first the error, then what a rank of a group does, as rc_report_json
writes it.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ringcomm.errors import refuse

__all__ = ["SUFFIX", "VERSION", "FlightFile", "Record", "key_of", "read_flight"]

VERSION = 3
SUFFIX = ".flight"

Record = dict[str, Any]  # a line of a file

HEAD = {"version": int, "kind": str, "error": str}
RECORD = {"group": str, "seen_by": int, "rank": int, "answered": bool, "state": str, "calls": list}
CALL = {"call": str, "outcome": str, "seconds": float, "ago": float | None, "waits_for": int | None}


class FlightFile(NamedTuple):
    kind: str  # of error
    error: str
    records: list[Record]  # the last one of each rank of each group
    damaged: int  # lines


def read_flight(file: Path) -> FlightFile:
    """Read a file. Raises ArgumentError if it is no flight record, or one of another version."""
    first, *lines = file.read_text(errors="replace").splitlines() or [""]
    try:
        version = _parse(first, {"version": int})["version"]
        if version != VERSION:
            raise refuse(f"version of {file}", VERSION, version)
        head = _parse(first, HEAD)
    except ValueError:
        raise refuse("file", "a flight record, as RINGCOMM_DUMP makes", str(file)) from None
    found: dict[tuple[str, int], Record] = {}
    whole = 0
    for line in lines:
        with suppress(ValueError):  # half written, on a full disk, or damaged
            record = _parse(line, RECORD)
            for call in record["calls"]:
                _check(call, CALL)
            key = key_of(record)
            found[key] = record | {"state": "no answer at first"} if key in found else record
            whole += 1
    return FlightFile(head["kind"], head["error"], [*found.values()], len(lines) - whole)


def key_of(record: Record) -> tuple[str, int]:
    return record["group"], record["rank"]


def _parse(line: str, fields: dict[str, Any]) -> Record:
    """Return the object of a line that has these fields. Raises ValueError if it is another one."""
    try:
        return _check(json.loads(line), fields)
    except RecursionError:  # nested too deeply
        raise ValueError(line) from None


def _check(value: Any, fields: dict[str, Any]) -> Record:
    if not isinstance(value, dict) or not all(
        name in value and isinstance(value[name], kind) for name, kind in fields.items()
    ):
        raise ValueError(value)
    return value
