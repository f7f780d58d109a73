"""Check ringcomm on a machine with a GPU: tests, examples, training, benchmarks beside NCCL, compute-sanitizer.

    python benchmarks/gpu_check.py -o FOLDER            every step, 16 minutes at most
    python benchmarks/gpu_check.py -o FOLDER tests …    these

It needs ringcomm, CuPy and pytest, and for some steps torch, NCCL or compute-sanitizer. A step that fails or times out
does not stop the others. FOLDER/gpu.txt has the output of all, the other files there the figures of `ringcomm bench`.
The exit status is 0 if every step that can run has passed, and 1 if one has failed or without a GPU.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from ringcomm.bench.machine import Machine

ROOT = Path(__file__).parent.parent
PYTHON = sys.executable
RINGCOMM = (PYTHON, "-m", "ringcomm")
# Without the settings of pyproject.toml, which need plugins.
OPTIONS = f"-c {os.devnull} --rootdir {ROOT} -p no:cacheprovider -v --tb=short --maxfail=4 -o faulthandler_timeout=60"
PYTEST = (PYTHON, "-m", "pytest", *OPTIONS.split(), "-m", "gpu")
TESTS, TRAINING, KERNELS = (
    str(ROOT / "tests" / name) for name in ("cuda/test_gpu.py", "project/test_examples.py", "cuda/gpu_kernels.py")
)
OTHERS = "reduce_scatter all_gather broadcast reduce gather scatter all_to_all send_recv"
EXIT_TIMEOUT = 5.0  # seconds in which an interrupted step writes its results


@dataclass(frozen=True)
class Step:
    """A command, and the seconds it may take."""

    name: str
    command: tuple[str, ...]
    seconds: int
    program: str = PYTHON  # the step is skipped without it
    gpu: bool = True  # … and without a GPU


@dataclass
class Result:
    step: Step
    outcome: str  # "passed", "failed", "skipped"
    reason: str = ""
    seconds: float = 0.0
    output: str = ""


def steps(gpus: int, folder: Path) -> list[Step]:
    # Kernels of two processes on one GPU are time-sliced, some milliseconds each.
    end, ranks = ("256M", gpus) if gpus > 1 else ("16M", 2)
    bench = f"--device cuda --vs nccl --ranks {ranks} -n 5 -w 5 --timeout 20 --json"
    few = f"all_reduce -b 4 -e {end} -f 16 {bench} {folder}/all_reduce.json"
    many = f"{OTHERS} -b 4K -e {end} -f 64 {bench} {folder}/others.json"
    alone = (
        f"all_reduce --device cuda --virtual-ranks --ranks 2,4,8 -b 4K -e 64M -f 4 -n 7 --json {folder}/virtual.json"
    )
    sweep = f"{ROOT}/benchmarks/gpu_sweep.py --json {folder}/sweep.json"
    direct = f"all_reduce reduce_scatter all_gather -b 1M -e {end} -f 16 --symmetric {bench} {folder}/symmetric.json"
    return [
        Step("doctor", (*RINGCOMM, "doctor"), 40, gpu=False),
        Step("tests", (*PYTEST, TESTS), 110),
        Step("example", (*RINGCOMM, "run", "-n", str(ranks), str(ROOT / "examples/gpu_allreduce.py")), 40),
        Step("training", (*PYTEST, TRAINING), 150),
        Step("virtual", (*RINGCOMM, "bench", *alone.split()), 50),
        Step("all_reduce", (*RINGCOMM, "bench", *few.split()), 70),
        Step("others", (*RINGCOMM, "bench", *many.split()), 70),
        Step("symmetric", (*RINGCOMM, "bench", *direct.split()), 40),
        Step("sweep", (PYTHON, *sweep.split()), 150),
        *(sanitized(tool, str(ranks)) for tool in ("memcheck", "racecheck", "synccheck")),
    ]


def sanitized(tool: str, ranks: str) -> Step:
    # `ringcomm run` starts the ranks, so the sanitizer follows them; it may not follow a fork.
    program = "compute-sanitizer"
    options = ("--tool", tool, "--target-processes", "all", "--error-exitcode", "9")
    return Step(tool, (program, *options, *RINGCOMM, "run", "-n", ranks, KERNELS), 80, program=program)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="for the reports")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="the steps to run (default: all)")
    arguments = parser.parse_args()
    folder = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    machine, results = Machine.here(), []
    every = {step.name: step for step in steps(len(machine.gpus), folder)}
    if unknown := {*arguments.steps} - {*every}:
        parser.error(f"unknown step {', '.join(sorted(unknown))}; the steps are {', '.join(every)}")
    for name in arguments.steps or every:
        (folder / f"{name}.json").unlink(missing_ok=True)  # of an earlier run
        results.append(attempt(every[name], machine.gpus))
        print(headline(results[-1]), flush=True)
        write(folder, machine, results)  # after each step: the next may crash the machine
    return int(not machine.gpus or any(result.outcome == "failed" for result in results))


def attempt(step: Step, gpus: list[str]) -> Result:
    if step.gpu and not gpus:
        return Result(step, "skipped", "no CUDA device")
    if not shutil.which(step.program):
        return Result(step, "skipped", f"{step.program} is not installed")
    start = time.monotonic()
    status, output = finish(step)
    reason = f"timed out after {step.seconds} s" if status is None else f"status {status}" if status else ""
    return Result(step, "failed" if reason else "passed", reason, time.monotonic() - start, output)


def finish(step: Step) -> tuple[int | None, str]:
    """Run a step; return its status, None after a timeout, and its output."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # the installed ringcomm, not the one in the current folder
    with TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            step.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        status: int | None = None
        try:
            status = process.wait(step.seconds - EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest and the benchmarks then write their results
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_TIMEOUT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children
            process.wait()
        log.seek(0)
        return status, log.read()


def headline(result: Result) -> str:
    reason = f": {result.reason}" if result.reason else ""
    return f"{result.step.name:<12} {result.outcome}{reason} ({result.seconds:.0f} s)"


def write(folder: Path, machine: Machine, results: list[Result]) -> None:
    lines = [f"{machine.date}, {', '.join(machine.gpus) or 'no GPU'}, {machine.cpu}, Python {machine.python}", ""]
    lines += [headline(result) for result in results]
    for result in results:
        if result.output:
            lines += ["", f"--- {result.step.name}: {' '.join(result.step.command)}", "", result.output.rstrip()]
    (folder / "gpu.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
