"""`ringcomm bench --unbound`: the first calls of ranks that nobody binds to cores, over many starts.

The kernel may leave two ranks on one core for a while, but only after they have started. So each start has fresh ranks.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from ringcomm.bench.comparison import Comparison, LibraryRanks, Measurement, Timing, progress
from ringcomm.bench.job import started
from ringcomm.bench.noise import noise
from ringcomm.bench.peers import LibrarySpec
from ringcomm.bench.sweep import BenchCase
from ringcomm.machine import topology

__all__ = ["START_SECONDS", "Starts"]

START_SECONDS = 0.3


class Starts(Comparison):
    """All libraries on this many unbound ranks. A round is a start."""

    @staticmethod
    def place(ranks: int, cores: int) -> str:  # noqa: ARG004 (as of other comparisons)
        return f"bound to no core, on {cores} cores"

    def start(self, library: LibrarySpec, timeout: float) -> AbstractContextManager[LibraryRanks]:
        return nullcontext(FreshRanks(replace(library, bound=False), self.ranks, timeout))

    def _measure(self, case: BenchCase, done: float, what: str) -> list[Measurement]:
        options = self._options(case) | {"pool": 0}  # one buffer: to fill many would give the kernel time
        timings = [Timing(job, False, 0) for job in self.jobs]
        request = ("start", case.collective, options, START_SECONDS, self.sweep.round_seconds)
        with noise(topology.cores() if self.sweep.noise else ()):
            for i, timing in product(range(self.sweep.rounds), timings):
                progress(done, f"{what}, start {i + 1} of {timing.job.name}")
                if ranks := self._try(timing.job, case, partial(timing.job.request, *request)):
                    first, settled, wrong = zip(*ranks, strict=True)
                    timing.seconds.append(max(first))
                    timing.settled.append(max(settled))
                    if self.sweep.check:
                        timing.wrong = sum(wrong) + (timing.wrong or 0)
        return [self._row(timing, case, 0.0) for timing in timings if timing.job in self.jobs and timing.seconds]


class FreshRanks:
    """Ranks of one library that start anew for each request."""

    def __init__(self, library: LibrarySpec, ranks: int, timeout: float) -> None:
        self.name = library.name
        self._start = partial(started, library, ranks, timeout)
        with self._start() as job:
            self.versions = job.versions
            job.close()

    def request(self, *request: Any, timeout: float | None = None) -> list[Any]:  # noqa: ARG002 (the time of a start)
        """Return the answer of each rank, as soon as they have started. They have the time of a start."""
        with self._start(*request) as job:
            job.close()
            return job.answers

    def close(self) -> None:
        """None are left."""
