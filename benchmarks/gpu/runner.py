"""The steps of a GPU run: each a process group that is killed at its limit, its output line by line in one file."""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from threading import Thread

__all__ = ["SUMMARY", "Result", "Run", "Step"]

SUMMARY = 12_000  # characters, at most
INTERRUPT_TIMEOUT = 3.0  # seconds in which an interrupted step writes its results
RESERVE = 4.0  # seconds of the budget that are left for the summary
LEAST = 4.0  # seconds for which a step is started
PR_SET_CHILD_SUBREAPER = 36
PROBE = (
    "import cupy; x = cupy.ones(10); cupy.cuda.runtime.deviceSynchronize(); assert x.sum() == 10; print('it answers')"
)


@dataclass(frozen=True)
class Step:
    """A command; `usual` are the seconds that it took on an H200, `limit` those after which it is killed."""

    name: str
    command: tuple[str, ...]
    usual: float
    limit: float
    shows: str = r"error|Error|FAILED|wrong=[1-9]|problem=\S|note="  # which lines the summary shows, beside the last
    program: str = sys.executable  # the step is skipped without it
    gpu: bool = True  # … and without a GPU
    environment: dict[str, str] = field(default_factory=dict)
    json: Path | None = None  # whose rows are copied into the one file
    background: bool = False  # the next steps start beside it
    after: str = ""  # a background step that has to end first


@dataclass
class Result:
    name: str
    outcome: str  # "passed", "failed", "skipped"
    reason: str = ""
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)  # for the summary

    def __str__(self) -> str:
        return f"{self.name:<14} {self.outcome}{': ' * bool(self.reason)}{self.reason} ({self.seconds:.0f} s)"


class Started:
    """A step that runs. A thread copies its output."""

    def __init__(self, run: "Run", step: Step) -> None:
        self.step, self.start = step, time.monotonic()
        self.lines: list[str] = []
        run.log(f"##### {step.name}: {' '.join(step.command)}")
        self.process = subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=run.environment | step.environment,
            start_new_session=True,
            text=True,
            errors="replace",
            bufsize=1,
        )
        self._reader = Thread(target=self._read, args=(run,), daemon=True)
        self._reader.start()

    def _read(self, run: "Run") -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            run.log(f"[{self.step.name} {run.seconds():6.1f}] {line.rstrip()}")

    def finish(self, limit: float) -> Result:
        """Wait, kill what is left, and return the outcome."""
        reason, status = "", None
        try:
            status = self.process.wait(max(0.0, limit))
        except subprocess.TimeoutExpired:
            reason = f"timed out after {limit:.0f} s"
            self.process.send_signal(signal.SIGINT)  # pytest and the benchmarks then write their results
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(INTERRUPT_TIMEOUT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # with its children
            self.process.wait()
        self._reader.join(1.0)
        if not self._reader.is_alive():  # else a process outside the group still has the pipe
            assert self.process.stdout
            self.process.stdout.close()
        reason = reason or (f"status {status}" if status else "")
        shown = [line for line in self.lines if re.search(self.step.shows, line)]
        lines = self.lines[-12:] if reason and not shown else shown or self.lines[-2:]
        return Result(self.step.name, "failed" if reason else "passed", reason, time.monotonic() - self.start, lines)


class Run:
    """A run of `budget` seconds, which writes into `folder`.

    With `adopting` this process becomes the parent of what outlives a step in a session of its own, as daemons do, and
    kills it; so it may have no other children.
    """

    def __init__(self, folder: Path, budget: float, gpu: bool, adopting: bool = False) -> None:
        self._adopting = adopting
        if adopting:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.results: list[Result] = []
        self.rows = folder / "rows.jsonl"
        self._start, self._budget, self._gpu = time.monotonic(), budget, gpu
        self._log = (folder / "log.txt").open("w", buffering=1, errors="replace")
        self._summary = folder / "summary.txt"
        self._background: dict[str, Started] = {}
        # The installed ringcomm, not the one in the current folder; and no output that is lost in a buffer.
        self.environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def left(self) -> float:
        return self._budget - RESERVE - self.seconds()

    def log(self, line: str) -> None:
        self._log.write(f"{line}\n")

    def take(self, steps: Iterable[Step]) -> bool:
        """Run the steps that fit, the most important first; return whether none has failed."""
        try:
            for step in steps:
                if not self._take(step):
                    break
        finally:  # also after an interrupt
            while self._background:
                _, started = self._background.popitem()
                self._add(started.finish(0.0 if sys.exc_info()[0] else self.left()))
            self._end_orphans()
            self._log.close()
        return not any(result.outcome == "failed" for result in self.results)

    def _take(self, step: Step) -> bool:
        """Run or skip a step; return whether the GPU still answers."""
        if step.after in self._background:
            self._add(self._background.pop(step.after).finish(min(step.limit, self.left())))
        if reason := self._unfit(step):
            self._add(Result(step.name, "skipped", reason))
            return True
        started = Started(self, step)
        if step.background:
            self._background[step.name] = started
            return True
        result = started.finish(min(step.limit, self.left()))
        self._end_orphans()
        self._add(result)
        self._copy_rows(step)
        return result.outcome == "passed" or not step.gpu or self._probe(step.name)

    def _unfit(self, step: Step) -> str:
        if step.gpu and not self._gpu:
            return "no CUDA device"
        if not shutil.which(step.program):
            return f"{step.program} is not installed"
        if self.left() < max(LEAST, 0.0 if step.background else step.usual):
            return f"takes {step.usual:.0f} s, of which {max(0.0, self.left()):.0f} are left"
        return ""

    def _probe(self, name: str) -> bool:
        """Return whether the GPU answers after a step that has failed."""
        for attempt in (1, 2):
            result = Started(self, Step(f"probe {attempt}", (sys.executable, "-c", PROBE), 3, 12)).finish(12)
            if result.outcome == "passed":
                return True
        self._add(Result("probe", "failed", f"the GPU does not answer after {name}: {' '.join(result.lines)}"))
        return False

    def _add(self, result: Result) -> None:
        self.results.append(result)
        self.log(f"== {result}, at {self.seconds():.0f} s")
        print(result, flush=True)
        self._summary.write_text(self.summary())  # after each step: the next may crash the machine

    def _end_orphans(self) -> None:
        if self._adopting:
            end_children(frozenset(each.process.pid for each in self._background.values()))

    def _copy_rows(self, step: Step) -> None:
        if step.json and step.json.exists():
            with self.rows.open("a") as rows:
                for row in json.loads(step.json.read_text())["rows"]:
                    rows.write(json.dumps({"step": step.name, **row}) + "\n")

    def summary(self) -> str:
        """Return the outcome of each step and its most telling lines, in at most SUMMARY characters."""
        heads = [str(result)[:300] for result in self.results]
        lines = [[f"    {line[:200]}" for line in result.lines] for result in self.results]
        sizes = [sum(len(line) + 1 for line in those) for those in lines]
        room, shares = SUMMARY - sum(len(head) + 1 for head in heads), dict[int, int]()
        for left, i in zip(range(len(heads), 0, -1), sorted(range(len(heads)), key=sizes.__getitem__), strict=True):
            shares[i] = min(sizes[i], room // left)  # what a step does not need is for those that need more
            room -= shares[i]
        parts = []
        for i, head in enumerate(heads):
            lengths = accumulate(len(line) + 1 for line in reversed(lines[i]))
            kept = sum(length <= shares[i] for length in lengths)
            parts += [head, *lines[i][len(lines[i]) - kept :]]
        return "\n".join(parts)


def end_children(kept: frozenset[int]) -> None:
    """Kill the children of this process that are not kept."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while found := {*map(int, children.read_text().split())} - kept:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
