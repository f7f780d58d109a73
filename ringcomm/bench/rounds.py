"""The measuring: all libraries in one run, interleaved round by round, each size on the slowest rank."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ringcomm.bench.job import START, Job, JobFailed, Refused
from ringcomm.bench.peers import Contender
from ringcomm.bench.plan import COPY_BYTES, Plan, Turn
from ringcomm.bench.rank.collectives import COLLECTIVES
from ringcomm.bench.scratch import scratch_folder

__all__ = ["Failure", "Lineup", "Measurement"]

OURS = "ringcomm"  # the job that also measures memcpy
ROUND_SECONDS = 0.005
WARM_UP_SECONDS = 1.0  # at least LEAST_WARM_UPS calls, at most those asked for
LEAST_WARM_UPS = 6  # MPICH changes its algorithm after the fifth call
MOST_BEFORE = 20  # calls that bring a library back into the caches at the start of its round
COPIES = 3
MOST_SECONDS = 3.0  # of one library at one size, once it has had LEAST_ROUNDS: some need seconds for a call
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Measurement:
    """One row: a library at one size. Times are seconds of one call on the slowest rank of each round."""

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
    buffers: str  # "rotated" beyond the last-level cache, or "cached": the same one every time
    rounds: int
    calls: int  # in a round
    median: float
    p10: float
    p90: float
    p99: float
    algbw: float  # bytes per second
    busbw: float
    wrong: int | None  # elements; None: not checked
    memcpy: float  # bytes per second and core, or rank on a GPU, at this size's turn


@dataclass(frozen=True)
class Failure:
    """Why a library has no row from here on."""

    library: str
    ranks: int
    collective: str | None
    bytes: int | None
    reason: str


@dataclass
class Lineup:
    """The libraries on so many ranks. One that fails is left out from then on; the others go on."""

    plan: Plan
    ranks: int
    patience: float
    progress: Callable[[float, str], None]
    jobs: list[Job] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    refused: set[tuple[str, ...]] = field(default_factory=set)  # what need not be asked for again

    def start(self, contenders: list[Contender], stack: ExitStack) -> None:
        for contender in contenders:
            self.progress(0.0, f"starting {contender.name}")
            folder = stack.enter_context(scratch_folder())
            try:
                job = Job(contender, self.ranks, folder, self.patience)
                stack.callback(job.kill)
                if job.name == OURS:  # takes longer than any call, and would try the patience of the first memcpy
                    job.ask("prepare_memcpy", COPY_BYTES, limit=START)
            except (JobFailed, Refused) as failure:
                self.failures.append(Failure(contender.name, self.ranks, None, None, str(failure)))
                continue
            self.jobs.append(job)
            self.versions[job.name] = job.versions

    def measure(self) -> Iterator[list[Measurement]]:
        """Yield the rows of each turn."""
        turns = self.plan.turns(self.ranks)
        for i, turn in enumerate(turns):
            if not self.jobs:
                return
            yield self._measure(turn, partial(self._tell, i, len(turns)))

    def _tell(self, i: int, turns: int, part: float) -> None:
        self.progress((i + part) / turns, f"{self.ranks} ranks, {i + 1} of {turns} sizes")

    def close(self) -> None:
        for job in self.jobs:
            job.close()

    def _measure(self, turn: Turn, progress: Callable[[float], None]) -> list[Measurement]:
        memcpy = self._memcpy(turn)
        series = [s for job in list(self.jobs) for s in self._prepare(job, turn)]
        for i in range(self.plan.rounds):
            progress(i / self.plan.rounds)
            # Each library follows every other one now and then.
            for one in series[i % len(series) :] + series[: i % len(series)] if series else []:
                self._try(one.job, turn, one.measure)
        if self.plan.check:
            for job in list(self.jobs):
                wrong = self._try(job, turn, partial(job.ask, "check"))
                for one in series:
                    if one.job is job and wrong is not None:
                        one.wrong = sum(wrong)
        return [self._row(one, turn, memcpy) for one in series if one.job in self.jobs]

    def _prepare(self, job: Job, turn: Turn) -> "list[Series]":
        plan = self.plan
        options = {
            "count": turn.count,
            "dtype": turn.dtype,
            "op": turn.op,
            "root": plan.root,
            "in_place": plan.places(turn.collective),
            "pool": plan.pool if turn.bytes else 0,
            "symmetric": plan.symmetric,
            "asynchronous": plan.asynchronous,
        }

        def first_calls() -> float:
            first = max(job.ask("prepare", turn.collective, options))
            warmups = min(plan.warmups, max(LEAST_WARM_UPS, round(WARM_UP_SECONDS / first)))
            return float(max(job.ask("round", plan.rotate, 0, max(1, warmups))))

        seconds = self._try(job, turn, first_calls)
        if seconds is None:
            return []
        kinds = [True] * (plan.rotate and turn.bytes > 0) + [False] * (2 * turn.bytes <= plan.pool or not plan.rotate)
        return [Series(job, rotated, max(1 + (not rotated), round(ROUND_SECONDS / seconds))) for rotated in kinds]

    def _memcpy(self, turn: Turn) -> float:
        ours = next((job for job in self.jobs if job.name == OURS), None)
        if ours is None:
            return 0.0
        copies = [self._try(ours, turn, partial(ours.ask, "memcpy", COPY_BYTES)) for _ in range(COPIES)]
        if not all(copies):
            return 0.0
        cores = self.ranks if self.plan.device == "cuda" else len(os.sched_getaffinity(0))
        ranks_of_a_core = self.ranks / min(self.ranks, cores)
        return ranks_of_a_core * COPY_BYTES / float(np.median([max(seconds) for seconds in copies]))

    def _try(self, job: Job, turn: Turn, action: Callable[[], Any]) -> Any:
        """Return what the action gives; None if the library fails in it, or has failed before."""
        if job not in self.jobs or (job.name, turn.collective, turn.dtype, turn.op) in self.refused:
            return None
        try:
            return action()
        except Refused as refusal:
            self.refused.add((job.name, turn.collective, turn.dtype, turn.op))
            self.failures.append(Failure(job.name, self.ranks, turn.collective, turn.bytes, str(refusal)))
            return None
        except JobFailed as failure:
            self.jobs.remove(job)
            self.failures.append(Failure(job.name, self.ranks, turn.collective, turn.bytes, str(failure)))
            return None

    def _row(self, one: "Series", turn: Turn, memcpy: float) -> Measurement:
        row, plan = COLLECTIVES[turn.collective], self.plan
        p10, median, p90, p99 = (float(p) for p in np.percentile(one.seconds, (10, 50, 90, 99)))
        return Measurement(
            library=one.job.name,
            ranks=self.ranks,
            collective=turn.collective,
            bytes=turn.bytes,
            count=turn.count,
            dtype=turn.dtype,
            op=turn.op if row.reduces else None,
            root=plan.root if row.rooted else None,
            in_place=plan.places(turn.collective),
            symmetric=plan.symmetric and one.job.name == OURS,
            asynchronous=plan.asynchronous,
            buffers="rotated" if one.rotated else "cached",
            rounds=len(one.seconds),
            calls=one.calls,
            median=median,
            p10=p10,
            p90=p90,
            p99=p99,
            algbw=turn.bytes / median,
            busbw=turn.bytes / median * row.bus_factor(self.ranks),
            wrong=one.wrong,
            memcpy=memcpy,
        )


@dataclass
class Series:
    """The rounds of one library with one kind of buffers."""

    job: Job
    rotated: bool
    calls: int
    seconds: list[float] = field(default_factory=list)
    wrong: int | None = None

    def measure(self) -> None:
        if len(self.seconds) >= LEAST_ROUNDS and self.calls * sum(self.seconds) > MOST_SECONDS:
            return
        self.seconds.append(max(self.job.ask("round", self.rotated, min(MOST_BEFORE, self.calls // 2), self.calls)))
