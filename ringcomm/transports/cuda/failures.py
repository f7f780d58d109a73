"""The errors of failed launches. After a mismatch the ranks exchange descriptions of their calls."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.errors import CollectiveTimeout, MismatchError, RingcommError
from ringcomm.transports.contract import LocalTransport

__all__ = ["UNKNOWN", "LaunchedCall", "compare_calls", "counts_differ", "timed_out"]

STALLED = "rank {} made no progress"
PLACES_DIFFER = "do not agree on where their arrays lie in symmetric buffers, as copy engines need (copy_engine_bytes),"
LATE = {"not started": "it was not called by rank {}", "no data": STALLED, "no slot": STALLED}


class LaunchedCall(NamedTuple):
    """A launched call as errors describe it."""

    description: str
    timeout: float
    by_copy_engines: bool = False
    counts: tuple[list[int], list[int]] | None = None  # of all_to_all: to send and to receive

    def __str__(self) -> str:
        return _described(self.description, self.by_copy_engines)


UNKNOWN = LaunchedCall("a call of a graph", math.nan)


def timed_out(rank: int, reason: str, peer: int, call: LaunchedCall, device: str) -> CollectiveTimeout:
    """Return the error of a kernel that waited for a peer."""
    waited = f"rank {rank} waited {call.timeout:.3g} s in {call} on {device}"
    return CollectiveTimeout(f"{waited}: {LATE[reason].format(peer)}", rank=peer)


def counts_differ(rank: int, peer: int, call: LaunchedCall, device: str) -> MismatchError:
    """Return the error of an all_to_all with counts that do not fit, which only two ranks can find."""
    text = f"ranks {rank} and {peer} do not agree in {call} on {device}"
    if call.counts:
        send, recv = call.counts
        text += f": this rank sends {send[peer]} elements to rank {peer} and expects {recv[peer]}"
    return MismatchError(text, rank=peer)


def compare_calls(
    channel: LocalTransport, peer: int, number: int, call: LaunchedCall, skipped: int, device: str
) -> tuple[MismatchError, bool]:
    """Return the error of a mismatch, and whether the group can continue: if no rank has skipped a later call.

    Collective: every rank finds the mismatch, and waits here for the others.
    """
    own, facts = str(call), []
    with suppress(RingcommError):
        mine = [call.description, call.by_copy_engines, skipped]
        facts = channel.all_gather_facts("all_gather", mine, call.timeout)
    calls = [_described(description, copied) for description, copied, _ in facts]
    ranks: dict[str, list[int]] = {}
    for rank, theirs in enumerate(calls):
        ranks.setdefault(theirs, []).append(rank)
    lines = [f"{format_ranks(where)}: {theirs}" for theirs, where in ranks.items()]
    lines = lines or [f"rank {channel.rank}: {own}", f"rank {peer}: another call"]
    other = next((rank for rank in reversed(range(len(calls))) if calls[rank] != own), peer)
    disagreement = _disagreement([(description, copied) for description, copied, _ in facts])
    text = "\n  ".join([f"the ranks {disagreement} on {device}, in call {number}:", *lines])
    got = calls[other] if calls else None
    error = MismatchError(text, rank=other, collective=own.partition("(")[0], epoch=number, expected=own, got=got)
    return error, bool(facts) and not any(others for *_, others in facts)


def _described(description: str, by_copy_engines: bool) -> str:
    return f"{description} by copy engines" if by_copy_engines else description


def _disagreement(calls: Sequence[tuple[str, bool]]) -> str:
    """Say what differs between calls: their descriptions, and whether copy engines move their data."""
    if len({description for description, _ in calls}) != 1:
        return "made different calls"
    if any(by_copy_engines for _, by_copy_engines in calls):
        return PLACES_DIFFER
    return "chose different kernels, or different numbers of blocks,"
