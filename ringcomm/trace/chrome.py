"""A trace in the format of Chrome and Perfetto: a process for each rank, a thread for each of its groups."""

from collections.abc import Iterator, Sequence
from typing import Any

from ringcomm.trace.entries import Call, Recording

__all__ = ["events", "ranks_of"]


def events(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the document, for json.dump; times in microseconds."""
    return {"displayTimeUnit": "ns", "traceEvents": [*_events(recordings)]}


def ranks_of(recordings: Sequence[Recording]) -> dict[tuple[str, int], int]:
    """Return the rank of each process in its largest group, by host and process id."""
    found: dict[tuple[str, int], int] = {}
    for each in recordings:  # the largest groups come first
        found.setdefault((each.host, each.pid), each.rank)
    return found


def _events(recordings: Sequence[Recording]) -> Iterator[dict[str, Any]]:
    ranks = ranks_of(recordings)
    for process, rank in ranks.items():
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}, process {process[1]}"}}
    for thread, each in enumerate(recordings):
        where = {"pid": ranks[each.host, each.pid], "tid": thread}
        name = f"rank {each.rank} of {each.size}, group {each.group[:6]}"
        yield {"ph": "M", "name": "thread_name", "args": {"name": name}, **where}
        for call in each.calls:
            yield {"name": call.name, "cat": call.kind, "ts": call.start * 1e6, **_kind(call), **where}


def _kind(call: Call) -> dict[str, Any]:
    if call.kind == "mark":
        return {"ph": "i", "s": "p"}
    arguments: dict[str, Any] = {}
    if call.kind != "wait":
        arguments = {"bytes": call.bytes, "dtype": call.dtype, "queued": call.queued, "failed": call.failed}
    if call.kind == "collective":
        waiting = {"waited (us)": call.waited * 1e6, "waited for rank": call.late}
        arguments |= {"epoch": call.epoch, "path": call.path, "chunks": call.chunks, "root": call.root, **waiting}
    elif call.kind == "message":
        arguments["peer"] = call.root
    return {"ph": "X", "dur": (call.end - call.start) * 1e6, "args": arguments}
