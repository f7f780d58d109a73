"""Check ringcomm on a machine with a GPU: right or wrong, the kernels' speed, processes beside NCCL, many cores.

    python benchmarks/gpu_check.py --budget 200 -o FOLDER              right or wrong, and the kernels alone
    python benchmarks/gpu_check.py --budget 260 -o FOLDER many         several processes at once under MPS, all cores
    python benchmarks/gpu_check.py --budget 60 -o FOLDER values speed  these steps

It needs ringcomm and CuPy, and for some steps pytest, torch, NCCL 2.30.3 or compute-sanitizer. Steps run in the order
of their importance; one that does not fit into what is left of the budget is skipped. Each is a process group, killed
at its limit; after one that fails the GPU is probed. FOLDER/log.txt has the output of all, line by line;
FOLDER/rows.jsonl their figures, as they come; FOLDER/summary.txt, which is printed last, the outcome in at most 12,000
characters. The exit status is 0 if every step that can run has passed, and 1 if one has failed or without a GPU.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # also with PYTHONSAFEPATH

from gpu.runner import Run
from gpu.steps import GROUPS, alone, many

from ringcomm.bench.interrupts import Interrupted, interruptible
from ringcomm.bench.machine import Machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=200, metavar="SECONDS", help="for all steps (default: 200)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="for the reports")
    parser.add_argument("--nccl", type=Path, metavar="FILE", help="the libnccl.so.2 to use")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="those of Open MPI, where there is no network")
    parser.add_argument("--emulated", action="store_true", help="on the emulated device: tries this program")
    steps = f"names of steps, or of their groups {' and '.join(GROUPS)} (default: all)"
    parser.add_argument("steps", nargs="*", metavar="STEP", help=steps)
    arguments = parser.parse_args()
    folder = arguments.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("rows.jsonl", "summary.txt"):
        (folder / old).unlink(missing_ok=True)
    machine = Machine.here()
    if arguments.budget <= 0:
        parser.error(f"--budget: expected seconds > 0, got {arguments.budget:g}")
    run = Run(folder, arguments.budget, bool(machine.gpus), adopting=True)
    groups = {"alone": alone(run.rows, arguments.emulated)}
    groups["many"] = many(folder, run.rows, arguments.nccl, arguments.wheels)
    every = {step.name: step for group in groups.values() for step in group}
    if unknown := {*arguments.steps} - {*every, *groups}:
        known = ", ".join([*groups, *every])
        parser.error(f"unknown step {', '.join(sorted(unknown))}; expected some of {known}")
    names = [name for each in arguments.steps or groups for name in ([s.name for s in groups.get(each, [])] or [each])]
    about = f"{machine.date}, {', '.join(machine.gpus) or 'no GPU'}, {machine.cpu}, Python {machine.python}"
    run.log(about)
    print(about, flush=True)
    right = False
    try:
        with interruptible():
            right = run.take(every[name] for name in dict.fromkeys(names))
    except Interrupted as interrupt:
        return interrupt.status
    finally:
        print(f"---- summary\n{run.summary()}", flush=True)
    return int(not right or not (machine.gpus or arguments.emulated))


if __name__ == "__main__":
    sys.exit(main())
