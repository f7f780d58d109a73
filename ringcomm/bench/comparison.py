"""All libraries measured in one run, in turns round by round, so that they see the same state of the machine."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

from ringcomm.bench.job import START_TIMEOUT, Job, JobFailed, Unsupported
from ringcomm.bench.peers import LibrarySpec
from ringcomm.bench.plan import COPY_BYTES, BenchCase, BenchPlan
from ringcomm.bench.rank.collectives import COLLECTIVES

__all__ = ["OURS", "Comparison", "LibraryFailure", "Measurement", "compare"]

OURS = "ringcomm"  # also measures memcpy
ROUND_SECONDS = 0.005
WARMUP_SECONDS = 1.0  # at least LEAST_WARMUPS calls, at most those asked for
LEAST_WARMUPS = 6  # MPICH changes its algorithm after the fifth call
MOST_UNTIMED = 20  # calls at the start of a round, which bring the library back into the caches
COPIES = 3
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
    asynchronous: bool
    buffers: str  # "rotated" through twice the last-level cache, or "cached": the same buffer every time
    rounds: int
    calls: int  # per round
    median: float
    p10: float
    p90: float
    p99: float
    algbw: float  # bytes per second
    busbw: float
    wrong: int | None  # elements; None: not checked
    memcpy: float  # bytes per second and core (on a GPU: and rank), measured just before


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
def compare(plan: BenchPlan, ranks: int, libraries: Iterable[LibrarySpec], timeout: float) -> "Iterator[Comparison]":
    """Start the libraries on this many ranks; end them at the end of the block."""
    cores = len(os.sched_getaffinity(0))
    bound = "one core each" if ranks <= cores else f"{cores} cores in turn (oversubscribed)"
    found = Comparison(plan, ranks, f"bound to {bound}", None if plan.device == "cuda" else cores)
    with ExitStack() as stack:
        stack.callback(progress, 1, "")
        for library in libraries:
            progress(0, f"starting {library.name}")
            temporary = TemporaryDirectory(prefix="ringcomm-bench-", ignore_cleanup_errors=True)
            try:
                job = Job(library, ranks, Path(stack.enter_context(temporary)), timeout)
            except JobFailed as failure:
                reason = f"{failure}; if it is broken: {library.cure}" if library.cure else str(failure)
                found.failures.append(LibraryFailure(library.name, ranks, None, None, reason))
            else:
                stack.callback(job.kill)
                found.jobs.append(job)
        progress(1, "")
        yield found
        for each in found.jobs:
            each.close()


@dataclass
class Comparison:
    """All libraries on this many ranks. One that fails is left out from then on."""

    plan: BenchPlan
    ranks: int
    placement: str  # of the ranks, in words
    cores: int | None  # that the ranks share; None: each has its own, or is none of this machine
    jobs: list[LibraryRanks] = field(default_factory=list)
    failures: list[LibraryFailure] = field(default_factory=list)
    unsupported: set[tuple[str, ...]] = field(default_factory=set)  # not requested again

    def measure(self) -> Iterator[list[Measurement]]:
        """Yield the rows of each case."""
        cases = self.plan.cases(self.ranks)
        for i, case in enumerate(cases):
            if not self.jobs:
                return
            rows = self._measure(case, i / len(cases), f"{self.ranks} ranks, {i + 1} of {len(cases)} sizes")
            progress(1, "")
            yield rows

    def _measure(self, case: BenchCase, done: float, what: str) -> list[Measurement]:
        memcpy = self._memcpy(case)
        timings = [timing for job in list(self.jobs) for timing in self._prepare(job, case)]
        for i in range(self.plan.rounds):
            progress(done, f"{what}, round {i + 1}")
            first = i % max(1, len(timings))  # so that no library always follows the same one
            for timing in timings[first:] + timings[:first]:
                self._try(timing.job, case, timing.measure)
        if self.plan.check:
            for job in list(self.jobs):
                wrong = self._try(job, case, partial(job.request, "check"))
                for timing in timings:
                    if timing.job is job and wrong is not None:
                        timing.wrong = sum(wrong)
        return [self._row(timing, case, memcpy) for timing in timings if timing.job in self.jobs]

    def _prepare(self, job: LibraryRanks, case: BenchCase) -> "list[Timing]":
        plan = self.plan
        options = {
            "count": case.count,
            "dtype": case.dtype,
            "op": case.op,
            "root": plan.root,
            "in_place": plan.runs_in_place(case.collective),
            "pool": plan.pool if case.bytes else 0,
            "symmetric": plan.symmetric,
            "asynchronous": plan.asynchronous,
        }

        def first_calls() -> float:
            first = max(job.request("prepare", case.collective, options))
            warmups = min(plan.warmups, max(LEAST_WARMUPS, round(WARMUP_SECONDS / first)))
            return float(max(job.request("round", True, 0, max(1, warmups))))

        seconds = self._try(job, case, first_calls)
        if seconds is None:
            return []
        kinds = [True] * (case.bytes > 0) + [False] * (2 * case.bytes <= plan.pool)
        return [Timing(job, rotated, max(1 + (not rotated), round(ROUND_SECONDS / seconds))) for rotated in kinds]

    def _memcpy(self, case: BenchCase) -> float:
        ours = next((job for job in self.jobs if job.name == OURS), None)
        if ours is None:
            return 0.0
        copy = partial(ours.request, "memcpy", COPY_BYTES, timeout=START_TIMEOUT)  # the first maps its pages
        copies = [self._try(ours, case, copy) for _ in range(COPIES)]
        if not all(copies):
            return 0.0
        ranks_per_core = self.ranks / min(self.ranks, self.cores or self.ranks)
        return ranks_per_core * COPY_BYTES / float(np.median([max(seconds) for seconds in copies]))

    def _try(self, job: LibraryRanks, case: BenchCase, action: Callable[[], Any]) -> Any:
        """Return the result of the action; None if the library fails, or has failed before."""
        key = (job.name, case.collective, case.dtype, case.op)
        if job not in self.jobs or key in self.unsupported:
            return None
        try:
            return action()
        except (Unsupported, JobFailed) as failure:
            if isinstance(failure, Unsupported):
                self.unsupported.add(key)
            else:
                self.jobs.remove(job)
            self.failures.append(LibraryFailure(job.name, self.ranks, case.collective, case.bytes, str(failure)))
            return None

    def _row(self, timing: "Timing", case: BenchCase, memcpy: float) -> Measurement:
        row, plan = COLLECTIVES[case.collective], self.plan
        p10, median, p90, p99 = (float(p) for p in np.percentile(timing.seconds, (10, 50, 90, 99)))
        return Measurement(
            library=timing.job.name,
            ranks=self.ranks,
            collective=case.collective,
            bytes=case.bytes,
            count=case.count,
            dtype=case.dtype,
            op=case.op if row.reduces else None,
            root=plan.root if row.rooted else None,
            in_place=plan.runs_in_place(case.collective),
            symmetric=plan.symmetric and timing.job.name == OURS,
            asynchronous=plan.asynchronous,
            buffers="rotated" if timing.rotated else "cached",
            rounds=len(timing.seconds),
            calls=timing.calls,
            median=median,
            p10=p10,
            p90=p90,
            p99=p99,
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
