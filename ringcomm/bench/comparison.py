"""All libraries measured in one run, in turns round by round, so that they see the same state of the machine."""

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self

import numpy as np

from ringcomm.bench.job import START_TIMEOUT, JobFailed, Unsupported, started
from ringcomm.bench.noise import noise
from ringcomm.bench.peers import LibrarySpec
from ringcomm.bench.rank.collectives import COLLECTIVES
from ringcomm.bench.sweep import COPY_BYTES, BenchCase, Sweep
from ringcomm.machine import topology

__all__ = ["OURS", "Comparison", "LibraryFailure", "Measurement", "compare"]

OURS = "ringcomm"  # also measures memcpy
WARMUP_SECONDS = 1.0  # at least LEAST_WARMUPS calls, at most those asked for
LEAST_WARMUPS = 6  # MPICH changes its algorithm after the fifth call
MOST_UNTIMED = 20  # calls at the start of a round, which bring the library back into the caches
COPIES = 3
COPY_AGE = 1.0  # seconds for which a measured memcpy serves the next cases too
MOST_SECONDS = 3.0  # per library and size, after LEAST_ROUNDS: a call of some libraries takes seconds
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Measurement:
    """A row: one library at one size. Times are seconds per call, on the slowest rank of each round."""

    library: str
    ranks: int
    collective: str
    bytes: int  # of the larger of input and output
    count: int  # elements of a block
    dtype: str
    op: str | None
    root: int | None
    in_place: bool
    symmetric: bool
    shared_arrays: bool
    asynchronous: bool
    unbound: bool
    noise: bool
    buffers: str  # "rotated" through twice the last-level cache, or "cached": the same buffer every time
    rounds: int  # unbound: starts, each the mean of its first calls
    calls: int  # per round; unbound: 0, as many as fit
    median: float
    p10: float
    p90: float
    p99: float
    worst: float
    settled: float | None  # unbound: the median of the starts some time later
    algbw: float  # bytes per second
    busbw: float
    wrong: int | None  # elements; None: not checked
    memcpy: float  # bytes per second and core (on a GPU: and rank), measured shortly before


@dataclass(frozen=True)
class LibraryFailure:
    """Why a library has no row from here on."""

    library: str
    ranks: int
    collective: str | None
    bytes: int | None
    reason: str


class LibraryRanks(Protocol):
    """The ranks of one library, which answer requests: a Job, or those of a world."""

    name: str
    versions: dict[str, str]

    def request(self, name: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Return the answer of each rank, or raise Unsupported or JobFailed."""
        ...

    def close(self) -> None: ...


@contextmanager
def compare(found: "Comparison", libraries: Iterable[LibrarySpec], timeout: float) -> "Iterator[Comparison]":
    """Start the libraries; end them at the end of the block."""
    with ExitStack() as stack:
        stack.callback(progress, 1, "")
        for library in libraries:
            progress(0, f"starting {library.name}")
            try:
                found.jobs.append(stack.enter_context(found.start(library, timeout)))
            except JobFailed as failure:
                reason = f"{failure}; if it is broken: {library.hint}" if library.hint else str(failure)
                found.failures.append(LibraryFailure(library.name, found.ranks, None, None, reason))
        progress(1, "")
        yield found
        for each in found.jobs:
            each.close()


@dataclass
class Comparison:
    """All libraries on this many ranks. One that fails is left out from then on."""

    sweep: Sweep
    ranks: int
    placement: str  # of the ranks, in words
    cores: int | None  # that the ranks share; None: each has its own, or is none of this machine
    jobs: list[LibraryRanks] = field(default_factory=list)
    failures: list[LibraryFailure] = field(default_factory=list)
    missing: list[LibraryFailure] = field(default_factory=list)  # why libraries have no row of the latest case
    copied: tuple[float, float] = (-math.inf, 0.0)  # when, and the speed
    unsupported: dict[tuple[str, ...], str] = field(default_factory=dict)  # not requested again, and why

    @classmethod
    def here(cls, sweep: Sweep, ranks: int) -> Self:
        """Return the comparison on ranks that the bench starts itself."""
        cores = len(topology.cores())
        return cls(sweep, ranks, cls.place(ranks, cores), None if sweep.device == "cuda" else cores)

    @staticmethod
    def place(ranks: int, cores: int) -> str:
        """Return the placement of ranks that the bench starts itself, in words."""
        return f"bound to {'one core each' if ranks <= cores else f'{cores} cores in turn (oversubscribed)'}"

    def start(self, library: LibrarySpec, timeout: float) -> AbstractContextManager[LibraryRanks]:
        """Start the ranks of a library; they end at the end of the block."""
        return started(library, self.ranks, timeout)

    def measure(self) -> Iterator[list[Measurement]]:
        """Yield the rows of each case."""
        cases = self.sweep.cases(self.ranks)
        for i, case in enumerate(cases):
            if not self.jobs:
                return
            rows = self._measure(case, i / len(cases), f"{self.ranks} ranks, {i + 1} of {len(cases)} sizes")
            progress(1, "")
            self._note_missing(case, {row.library for row in rows})
            yield rows

    def _measure(self, case: BenchCase, done: float, what: str) -> list[Measurement]:
        memcpy = self._memcpy(case)
        timings = [timing for job in list(self.jobs) for timing in self._prepare(job, case)]
        # Only now: without it, `_prepare` has found how many calls fit into a round.
        with noise(topology.cores() if self.sweep.noise else ()):
            for i in range(self.sweep.rounds):
                progress(done, f"{what}, round {i + 1}")
                first = i % max(1, len(timings))  # so that no library always follows the same one
                for timing in timings[first:] + timings[:first]:
                    self._try(timing.job, case, timing.measure)
        if self.sweep.check:
            for job in list(self.jobs):
                wrong = self._try(job, case, partial(job.request, "check"))
                for timing in timings:
                    if timing.job is job and wrong is not None:
                        timing.wrong = sum(wrong)
        # A library that could not do a single round has a timing without seconds.
        return [self._row(timing, case, memcpy) for timing in timings if timing.job in self.jobs and timing.seconds]

    def _note_missing(self, case: BenchCase, measured: set[str]) -> None:
        """Note why libraries that take part, or took part before they failed, have no row of this case."""
        self.missing = [
            LibraryFailure(name, self.ranks, case.collective, case.bytes, reason)
            for (name, *what), reason in self.unsupported.items()
            if name not in measured and what in ([], [case.collective, case.dtype, case.op])
        ]

    def _options(self, case: BenchCase) -> dict[str, Any]:
        sweep = self.sweep
        return {
            "count": case.count,
            "dtype": case.dtype,
            "op": case.op,
            "root": sweep.root,
            "in_place": sweep.runs_in_place(case.collective),
            "pool": sweep.pool if case.bytes else 0,
            "memory": sweep.memory,
            "asynchronous": sweep.asynchronous,
        }

    def _prepare(self, job: LibraryRanks, case: BenchCase) -> "list[Timing]":
        sweep = self.sweep

        def first_calls() -> float:
            first = max(job.request("prepare", case.collective, self._options(case)))
            warmups = min(sweep.warmups, max(LEAST_WARMUPS, round(WARMUP_SECONDS / first)))
            return float(max(job.request("round", True, 0, max(1, warmups))))

        seconds = self._try(job, case, first_calls)
        if seconds is None:
            return []
        kinds = [True] * (case.bytes > 0) + [False] * (2 * case.bytes <= sweep.pool)
        return [Timing(job, rotated, max(1 + (not rotated), round(sweep.round_seconds / seconds))) for rotated in kinds]

    def _memcpy(self, case: BenchCase) -> float:
        ours = next((job for job in self.jobs if job.name == OURS), None)
        if ours is None:
            return 0.0
        if time.monotonic() - self.copied[0] < COPY_AGE:
            return self.copied[1]
        copy = partial(ours.request, "memcpy", COPY_BYTES, timeout=START_TIMEOUT)  # the first maps its pages
        copies = [self._try(ours, case, copy) for _ in range(COPIES)]
        if not all(copies):
            return 0.0
        ranks_per_core = self.ranks / min(self.ranks, self.cores or self.ranks)
        speed = ranks_per_core * COPY_BYTES / float(np.median([max(seconds) for seconds in copies]))
        self.copied = time.monotonic(), speed
        return speed

    def _try(self, job: LibraryRanks, case: BenchCase, action: Callable[[], Any]) -> Any:
        """Return the result of the action; None if the library fails, or has failed before."""
        key: tuple[str, ...] = job.name, case.collective, case.dtype, case.op
        if job not in self.jobs or key in self.unsupported:
            return None
        try:
            return action()
        except (Unsupported, JobFailed) as failure:
            if isinstance(failure, JobFailed):
                self.jobs.remove(job)
                key = (job.name,)
            self.unsupported[key] = str(failure)
            self.failures.append(LibraryFailure(job.name, self.ranks, case.collective, case.bytes, str(failure)))
            return None

    def _row(self, timing: "Timing", case: BenchCase, memcpy: float) -> Measurement:
        row, sweep = COLLECTIVES[case.collective], self.sweep
        p10, median, p90, p99 = (float(p) for p in np.percentile(timing.seconds, (10, 50, 90, 99)))
        return Measurement(
            library=timing.job.name,
            ranks=self.ranks,
            collective=case.collective,
            bytes=case.bytes,
            count=case.count,
            dtype=case.dtype,
            op=case.op if row.reduces else None,
            root=sweep.root if row.rooted else None,
            in_place=sweep.runs_in_place(case.collective),
            symmetric=sweep.symmetric and timing.job.name == OURS,
            shared_arrays=sweep.shared_arrays and timing.job.name == OURS,
            asynchronous=sweep.asynchronous,
            unbound=sweep.unbound,
            noise=sweep.noise,
            buffers="rotated" if timing.rotated else "cached",
            rounds=len(timing.seconds),
            calls=timing.calls,
            median=median,
            p10=p10,
            p90=p90,
            p99=p99,
            worst=max(timing.seconds),
            settled=float(np.median(timing.settled)) if timing.settled else None,
            algbw=case.bytes / median,
            busbw=case.bytes / median * row.bus_factor(self.ranks),
            wrong=timing.wrong,
            memcpy=memcpy,
        )


@dataclass
class Timing:
    """The rounds of one library with one kind of buffers."""

    job: LibraryRanks
    rotated: bool
    calls: int
    seconds: list[float] = field(default_factory=list)
    settled: list[float] = field(default_factory=list)
    wrong: int | None = None

    def measure(self) -> None:
        if len(self.seconds) >= LEAST_ROUNDS and self.calls * sum(self.seconds) > MOST_SECONDS:
            return
        untimed = min(MOST_UNTIMED, self.calls // 2)
        self.seconds.append(max(self.job.request("round", self.rotated, untimed, self.calls)))


def progress(share: float, what: str) -> None:
    """Draw a progress bar on standard error if that is a terminal; clear it at the end."""
    if sys.stderr.isatty():
        bar = "" if share >= 1 else f"[{'#' * int(30 * share):30}] {what}"[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[K{bar}", end="", file=sys.stderr, flush=True)
