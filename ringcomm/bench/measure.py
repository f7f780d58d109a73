"""Taking the times. A round is a number of calls in a row; what counts is the slowest rank of each round."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import repeat
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

from ringcomm import Communicator

__all__ = ["memcpy_speed", "time_rounds"]

ROUNDS = 21
ROUND_SECONDS = 0.025
COPY_BYTES = 256 << 20  # larger than any cache


def time_rounds(comm: Communicator, call: Callable[[], object], warmups: int) -> npt.NDArray[np.float64]:
    """Return the seconds per call of ROUNDS rounds, on the slowest rank of each."""
    estimate = time_calls(call, max(1, warmups))
    # Rank 0's number for all: what the ranks call must agree.
    calls = np.array([max(1, round(ROUND_SECONDS / estimate))])
    comm.broadcast(calls)
    seconds = np.empty(ROUNDS)
    for i in range(ROUNDS):
        comm.barrier()
        seconds[i] = time_calls(call, int(calls[0]))
    comm.all_reduce(seconds, "max")
    return seconds


def time_calls(call: Callable[[], object], calls: int) -> float:
    """Return the seconds that one of `calls` calls takes on this rank."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        times = repeat(None, calls)
        start = perf_counter_ns()
        for _ in times:
            call()
        return (perf_counter_ns() - start) / 1e9 / calls
    finally:
        if collecting:
            gc.enable()


def memcpy_speed(comm: Communicator, cores: int) -> float:
    """Return the bytes per second that each core copies while all ranks copy COPY_BYTES at once."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.zeros_like(source)
    seconds = np.empty(5)
    for i in range(seconds.size):
        comm.barrier()
        seconds[i] = time_calls(lambda: np.copyto(target, source), 1)
    comm.all_reduce(seconds, "max")
    return COPY_BYTES * comm.size / min(comm.size, cores) / float(np.median(seconds))
