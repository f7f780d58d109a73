"""Compare `ringcomm plan` with steps of examples/train_gpt.py on this machine; print the table of docs/plan.md.

    python benchmarks/plan.py [-n 2 4] [--steps 50]

Needs torch. `ringcomm plan --measure` is run first, for each number of ranks: nothing is fitted to the steps. A figure
is the median over the last half of the run. It takes about half a minute a layout; nothing else may run meanwhile.
"""

import argparse
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

from ringcomm.plan.measure import measure
from ringcomm.plan.model.devices import Accelerator
from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.transformer import Transformer
from ringcomm.plan.model.workload import Workload
from ringcomm.plan.price.candidate import price
from ringcomm.plan.train_command import train_command

ROOT = Path(__file__).parents[1]
MODEL = Transformer(layers=8, hidden=256, heads=8, vocab=len({*"".join(topics.values()), "\n"}), seq=128)
BATCH = 16
PRINTS = 10  # of a run of the example

LAYOUTS = {
    2: [
        ParallelLayout(dp=2, micro_batch=8),
        ParallelLayout(dp=2, micro_batch=2),
        ParallelLayout(dp=2, micro_batch=8, zero=1),
        ParallelLayout(tp=2, micro_batch=16),
        ParallelLayout(tp=2, micro_batch=16, sequence_parallel=True),
        ParallelLayout(pp=2, micro_batch=8),
        ParallelLayout(pp=2, micro_batch=2),
        ParallelLayout(pp=2, micro_batch=2, chunks=2),
    ],
    4: [
        ParallelLayout(dp=4, micro_batch=4),
        ParallelLayout(dp=4, micro_batch=4, zero=1),
        ParallelLayout(dp=2, tp=2, micro_batch=8),
        ParallelLayout(dp=2, pp=2, micro_batch=4),
        ParallelLayout(dp=2, pp=2, micro_batch=2, chunks=2),
        ParallelLayout(tp=2, pp=2, micro_batch=4),
        ParallelLayout(tp=4, micro_batch=16),
        ParallelLayout(pp=4, micro_batch=2),
    ],
}


def measured(layout: ParallelLayout, device: Accelerator, steps: int) -> float:
    """Return the seconds of a step of the example."""
    command = shlex.split(train_command(Workload(MODEL, device, layout.gpus, BATCH), layout))[1:]
    words = [sys.executable, "-m", "torch.distributed.run", *command, "--steps", str(steps)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    rates = [float(rate.replace(",", "")) for rate in re.findall(r"([\d,]+) tokens/s", run.stdout)]
    return BATCH * MODEL.seq / median(rates[PRINTS // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, nargs="+", choices=LAYOUTS, default=[*LAYOUTS], help="ranks (default: 2 4)")
    parser.add_argument("--steps", type=int, default=50, help="of each layout (default: 50)")
    arguments = parser.parse_args()
    print("| Ranks | Layout | Measured, ms | Predicted, ms | Error | Place, measured | Place, predicted |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for ranks in arguments.n:
        device = measure(ranks)
        layouts = LAYOUTS[ranks]
        predicted = [price(Workload(MODEL, device, ranks, BATCH), layout).cost.seconds for layout in layouts]
        found = [measured(layout, device, arguments.steps) for layout in layouts]
        for layout, real, planned in zip(layouts, found, predicted, strict=True):
            places = f"{sorted(found).index(real) + 1} | {sorted(predicted).index(planned) + 1}"
            error = f"{planned / real - 1:+.0%}"
            print(f"| {ranks} | {described(layout)} | {real * 1e3:.1f} | {planned * 1e3:.1f} | {error} | {places} |")


def described(layout: ParallelLayout) -> str:
    """Return the fields that are not 1, and the micro-batch."""
    axes = [f"{axis} {size}" for axis in ("dp", "tp", "pp") if (size := getattr(layout, axis)) > 1]
    more = [f"{name} {value}" for name in ("chunks", "zero") if (value := getattr(layout, name)) > (name == "chunks")]
    sharded = ["sequence parallel"] * (layout != replace(layout, sequence_parallel=False))
    return ", ".join([*axes, *more, *sharded, f"micro-batch {layout.micro_batch}"])


if __name__ == "__main__":
    main()
