"""The text of a flight record: the error, who waits for whom, and the last calls of every rank, the latest first."""

import logging
from collections.abc import Iterator
from pathlib import Path

from ringcomm.trace.flight_files import Record, read_flight
from ringcomm.trace.report import printable
from ringcomm.trace.waiting import explain

__all__ = ["describe"]

log = logging.getLogger("ringcomm")


def describe(file: Path) -> str:
    """Return the text of a file. Damaged lines are left out, with a warning; raises ArgumentError if it is none."""
    flight = read_flight(file)
    if flight.damaged:
        log.warning("%s: left out %d lines, which are damaged", file, flight.damaged)
    groups: dict[str, list[Record]] = {}
    for record in flight.records:
        groups.setdefault(record["group"], []).append(record)
    lines = f"{flight.kind}: {flight.error}".splitlines()
    for group, ranks in groups.items():
        lines += ["", f"group {group}, seen by rank {ranks[0]['seen_by']}"]
        waits = {each["rank"]: peer for each in ranks if (peer := _waited_for(each)) is not None}
        if flight.kind != "MismatchError":  # where a rank may wait that has yet to compare the calls
            lines += [f"  {line}" for line in explain(waits)]
        for each in ranks:
            lines += [f"  rank {each['rank']}", *(f"    {text}" for text in _texts(each))]
    return "".join(f"{printable(line)}\n" for line in lines)


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
