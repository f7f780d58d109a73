"""A trace in the format of Chrome and Perfetto: a process for each one of the job, a thread for each of its groups."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from ringcomm.trace.entries import Call, Recording, processes_of

__all__ = ["events"]


def events(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the document, for json.dump; times in microseconds."""
    return {"displayTimeUnit": "ns", "traceEvents": [*_events(recordings)]}


def _events(recordings: Sequence[Recording]) -> Iterator[dict[str, Any]]:
    found = processes_of(recordings)
    processes = {process: number for number, process in enumerate(found)}
    for process, each in found.items():
        name = f"rank {each.job_rank}, process {each.pid}"
        yield {"ph": "M", "pid": processes[process], "name": "process_name", "args": {"name": name}}
    numbers = count()
    for thread, each in enumerate(recordings):
        where = {"pid": processes[each.process], "tid": thread}
        name = f"rank {each.rank} of {each.size}, group {each.group[:6]}"
        yield {"ph": "M", "name": "thread_name", "args": {"name": name}, **where}
        for call in each.calls:
            event = {"name": call.name, "cat": call.kind, **where}
            if call.kind == "mark":
                yield {"ph": "i", "s": "p", "ts": call.start * 1e6, **event}
            elif call.queued or call.kind == "message":  # these may overlap others
                event["id"] = next(numbers)
                yield {"ph": "b", "ts": call.start * 1e6, "args": _arguments(call), **event}
                yield {"ph": "e", "ts": call.end * 1e6, **event}
            else:
                times = {"ts": call.start * 1e6, "dur": (call.end - call.start) * 1e6}
                yield {"ph": "X", **times, "args": _arguments(call), **event}


def _arguments(call: Call) -> dict[str, Any]:
    if call.kind == "wait":
        return {}
    arguments = {"bytes": call.bytes, "dtype": call.dtype, "queued": call.queued, "failed": call.failed}
    if call.kind == "message":
        return {**arguments, "peer": call.root}
    waiting = {"waited (us)": call.waited * 1e6, "waited for rank": call.late}
    return {**arguments, "epoch": call.epoch, "path": call.path, "chunks": call.chunks, "root": call.root, **waiting}
