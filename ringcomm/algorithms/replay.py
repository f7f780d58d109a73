"""Evaluate recorded schedules in NumPy: the exact bits that a transport must produce."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringcomm.algorithms.lockstep import RankMemory, call_layout, execute
from ringcomm.algorithms.schedule import Algorithm, Lengths, even, record
from ringcomm.types import COLLECTIVES

__all__ = ["replay"]


def replay(
    algorithm: Algorithm,
    inputs: Sequence[Any],
    combine: Callable[[Any, Any], Any] = np.add,
    *,
    lengths: Sequence[Lengths] | None = None,
    root: int = 0,
) -> list[Any]:
    """Return the output of each rank for the inputs `inputs[rank]`, flat arrays (empty for a rank without input).

    Each result of `combine` is rounded to the dtype of the arrays. Without `lengths`, one per rank, the blocks of a
    gather or all_gather have the lengths of the arrays; other arrays divide evenly.
    """
    size = len(inputs)
    if lengths is None:
        gathers = COLLECTIVES[algorithm.collective].given == "BLOCK"
        rows = tuple(array.size for array in inputs) if gathers else even(inputs[root].size, size)
        lengths = [Lengths(rows)] * size
    schedules = [record(algorithm, rank, size, lengths[rank], root) for rank in range(size)]
    memories = [
        RankMemory(
            call_layout(algorithm.collective, rank, lengths[rank], root),
            schedules[rank].scratch,
            array,
            lambda count: np.empty(count, inputs[root].dtype),
        )
        for rank, array in enumerate(inputs)
    ]
    execute(schedules, memories, combine)
    return [memory.result() for memory in memories]
