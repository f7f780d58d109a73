"""Recorded schedules evaluated in NumPy: the bits that a transport which follows them must end with."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringcomm.algorithms.lockstep import Memory, carry_out, places
from ringcomm.algorithms.schedule import Algorithm, Lengths, even, record

__all__ = ["replay"]


def replay(
    algorithm: Algorithm,
    inputs: Sequence[Any],
    combine: Callable[[Any, Any], Any] = np.add,
    *,
    lengths: Sequence[Lengths] | None = None,
    root: int = 0,
) -> list[Any]:
    """Return what each rank has in the end where it gives `inputs[rank]`, a flat array (empty if it gives nothing).

    What `combine` returns is rounded to the dtype of the arrays, each time. Without `lengths`, one for each rank, the
    arrays of a gather and all_gather say how long the blocks are, and others divide evenly.
    """
    size = len(inputs)
    if lengths is None:
        gathers = algorithm.collective in ("gather", "all_gather")
        rows = tuple(array.size for array in inputs) if gathers else even(inputs[root].size, size)
        lengths = [Lengths(rows)] * size
    schedules = [record(algorithm, rank, size, lengths[rank], root) for rank in range(size)]
    memories = [
        Memory(
            places(algorithm.collective, rank, lengths[rank], root),
            schedules[rank].scratch,
            array,
            lambda count: np.empty(count, inputs[root].dtype),
        )
        for rank, array in enumerate(inputs)
    ]
    carry_out(schedules, memories, combine)
    return [memory.result() for memory in memories]
