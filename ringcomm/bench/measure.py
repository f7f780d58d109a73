"""Taking the times. A round is a number of calls in a row; what counts is the slowest rank of each round."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringcomm import Communicator, MemoryShortage

__all__ = ["Memcpy", "measure_memcpy", "time_rounds"]

ROUNDS = 21
ROUND_SECONDS = 0.025
COPY_BYTES = 256 << 20  # larger than the caches

Array = npt.NDArray[np.uint8]


class Memcpy(NamedTuple):
    """What the machine can do without any library: all ranks copy blocks of `bytes` at once."""

    bytes: int
    speed: float  # bytes per second and core


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


def measure_memcpy(comm: Communicator, cores: int) -> Memcpy:
    source, target = copy_buffers(comm)
    seconds = np.empty(5)
    for i in range(seconds.size):
        comm.barrier()
        seconds[i] = time_calls(lambda: np.copyto(target, source), 1)
    comm.all_reduce(seconds, "max")
    return Memcpy(source.size, source.size * comm.size / min(comm.size, cores) / float(np.median(seconds)))


def copy_buffers(comm: Communicator) -> tuple[Array, Array]:
    """Return two arrays of COPY_BYTES, or of what fits: where it does not, `empty` refuses on every rank."""
    size = COPY_BYTES
    while True:
        with suppress(MemoryShortage):
            source, target, _ = comm.empty((3, size), np.uint8)  # the third is left to whatever else runs here
            return source, target
        size //= 2
