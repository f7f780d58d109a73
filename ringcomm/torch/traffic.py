"""Counts the bytes that a program sends on the backend ringcomm, from the calls it makes.

Around a training step::

    with record_traffic() as calls:
        step()
    print(bytes_sent(calls, dist.group.WORLD))
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringcomm.errors import refuse
from ringcomm.torch import observers

__all__ = ["RecordedCall", "bytes_sent", "record_traffic"]


class RecordedCall(NamedTuple):
    """A call on the backend ringcomm: `payload` is the size of its result, or of the sent tensor, in bytes."""

    operation: str
    payload: int
    group: str


# Bytes each of n ranks sends per byte of payload with a bandwidth-optimal algorithm: the factors of nccl-tests, except
# that nccl-tests counts the larger side of a reduce_scatter, and a recorded call its result.
FACTORS = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "reduce_scatter": lambda n: Fraction(n - 1),
    "broadcast": lambda n: Fraction(1),
    "send": lambda n: Fraction(1),
    "recv": lambda n: Fraction(0),
    "barrier": lambda n: Fraction(0),
}


@contextmanager
def record_traffic() -> Iterator[list[RecordedCall]]:
    """Record this rank's calls on the backend ringcomm."""
    calls: list[RecordedCall] = []

    def record(group: Any, call: str, outputs: Sequence[torch.Tensor]) -> None:
        calls.append(RecordedCall(call, sum(tensor.nbytes for tensor in outputs), group.group_name))

    observers.recorders.append(record)
    try:
        yield calls
    finally:
        observers.recorders.remove(record)


def bytes_sent(calls: Sequence[RecordedCall], group: dist.ProcessGroup) -> Fraction:
    """Return the bytes this rank sends in those calls that run on a group, with bandwidth-optimal algorithms.

    Raises:
        ArgumentError: the bytes of a call depend on more than its payload, as those of a gather do on the root.
    """
    on_group = [call for call in calls if call.group == group.group_name]
    if others := {call.operation for call in on_group} - FACTORS.keys():
        raise refuse("recorded calls", f"only {', '.join(FACTORS)}", ", ".join(sorted(others)))
    return sum((call.payload * FACTORS[call.operation](group.size()) for call in on_group), Fraction())
