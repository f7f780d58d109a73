"""Measure training steps of ringcomm.parallel on ringcomm and on Gloo, in the same processes, in turns.

    python benchmarks/parallel.py [-n 2 4] [-o results/FOLDER/parallel.json]
    python benchmarks/parallel.py --read results/FOLDER/parallel.json     the table once more

Needs torch. All ranks are on one axis: replicas of a model of 25 million parameters with 16 rows each, by DataParallel
and by torch's DistributedDataParallel; parts of the layers of a GPT, with little and with much to compute; its layers
one after the other, by 1F1B with 8 micro-batches. A step is forward, backward and optimizer; a figure is the median,
over the rounds, of the slowest rank. Where that makes sense a third group takes its turn, which sends nothing: no
backend can make the step faster than that.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_backend import BACKENDS, alternate  # beside this file

import ringcomm
from ringcomm.bench.machine import Machine
from ringcomm.parallel import (
    Axis,
    DataParallel,
    GPTConfig,
    Grid,
    Pipeline,
    gpt_loss,
    gpt_stages,
    make_schedule,
)

Step = Callable[[], object]

GPT = GPTConfig(vocabulary=1024, context=128, layers=4, hidden=256, heads=8, tied=False)
FEW, MANY = 1, 8  # sequences of a batch
SECONDS = 0.3  # of each step in a round
OURS, THEIRS = "DataParallel", "DistributedDataParallel"
TENSOR = {f"tensor, {sequences} x {GPT.context} tokens": sequences for sequences in (FEW, MANY)}
PIPELINE = f"pipeline, {MANY} x {GPT.context} tokens"
GOALS = {OURS: 1.3, **dict.fromkeys(TENSOR, 2.0), PIPELINE: 1.0}  # times as fast as on Gloo
NOTHING = "fake"  # torch's backend that sends nothing: its numbers are wrong, its steps are the limit
NEAR = 1.05  # what DataParallel may take, in times of DistributedDataParallel on the same backend


def grid_of(axis: str, backend: str) -> Grid:
    """Return the grid that has all ranks on one axis, on this backend."""
    grid, ranks = Grid.alone(), range(dist.get_world_size())
    group = dist.new_group(backend=backend)
    setattr(grid, axis, Axis(axis, len(ranks), dist.get_rank(), tuple(ranks), group))
    return grid


def replicas(backend: str, *, torchs: bool) -> Step:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(3)]
    model: nn.Module = nn.Sequential(*layers)
    dp = grid_of("dp", backend).dp
    if torchs:
        model = DistributedDataParallel(model, process_group=dp.group, gradient_as_bucket_view=True)
        finish: Step = lambda: None  # noqa: E731 (one expression)
    else:
        finish = DataParallel(model, dp).finish
    x, end = torch.randn(16, 1024), ending(model.parameters())

    def step() -> None:
        model(x).square().mean().backward()
        finish()
        end()

    return step


def tensor(backend: str, sequences: int) -> Step:
    grid = grid_of("tp", backend)
    (model,) = gpt_stages(GPT, grid)
    (inputs, targets), loss, end = texts(sequences), gpt_loss(GPT, grid), ending(model.parameters())

    def step() -> None:
        loss(model(inputs), targets).backward()
        end()

    return step


@cache
def pipeline_stages() -> Sequence[nn.Module]:
    """Return the stages of this rank: the same for all backends, for two copies of a model differ by 2 %."""
    return gpt_stages(GPT, grid_of("pp", "ringcomm"))


def pipeline(backend: str) -> Step:
    grid, stages = grid_of("pp", backend), pipeline_stages()
    pipe = Pipeline(grid, stages, make_schedule("1f1b", grid.pp.size, MANY), gpt_loss(GPT, grid))
    batch, end = texts(MANY), ending(stages[0].parameters())

    def step() -> None:
        pipe.step(*batch)
        end()

    return step


def backends(step: str) -> tuple[str, ...]:
    """Return those to measure a step on: a stage cannot go on from nothing, nor does torch's DDP."""
    return BACKENDS if step in (PIPELINE, THEIRS) else (*BACKENDS, NOTHING)


def ending(parameters: Iterable[nn.Parameter]) -> Step:
    """Return what comes after backward."""
    optimizer = torch.optim.SGD(parameters, lr=1e-4)

    def end() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return end


def texts(sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(GPT.vocabulary, (sequences, GPT.context + 1), generator=draw)
    return ids[:, :-1], ids[:, 1:]


def main(rank: int, size: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("ringcomm", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)
    steps: list[dict[str, Callable[[str], Step]]] = [  # those of a list take turns
        {OURS: partial(replicas, torchs=False), THEIRS: partial(replicas, torchs=True)},
        *({name: partial(tensor, sequences=sequences)} for name, sequences in TENSOR.items()),
        {PIPELINE: pipeline},
    ]
    rows = []
    for makers in steps:
        calls = {(name, backend): make(backend) for name, make in makers.items() for backend in backends(name)}
        figures = alternate(calls, SECONDS, rounds)
        for name in makers:
            times = {backend: figures[name, backend] for backend in backends(name)}
            rows.append({"step": name, "ranks": size, **times})
    if rank == 0:
        Path(folder, f"{size}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def ratio(row: dict) -> float:
    return row["gloo"]["median"] / row["ringcomm"]["median"]


def table(rows: list[dict]) -> str:
    """Return the results as Markdown, with what was to reach."""
    heads = ("a step of", "ranks", "ringcomm, ms", "gloo, ms", "times as fast", "to reach", "at most")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        times = " | ".join(f"{row[backend]['median'] * 1e3:.1f}" for backend in BACKENDS)
        goal = f"{GOALS[row['step']]:g}" if row["step"] in GOALS else ""
        most = f"{row['gloo']['median'] / row[NOTHING]['median']:.2f}" if NOTHING in row else ""
        lines.append(f"| {row['step']} | {row['ranks']} | {times} | {ratio(row):.2f} | {goal} | {most} |")
    lines.append("")
    for ours in (row for row in rows if row["step"] == OURS):
        (theirs,) = (row for row in rows if (row["step"], row["ranks"]) == (THEIRS, ours["ranks"]))
        for backend in BACKENDS:
            share = ours[backend]["median"] / theirs[backend]["median"]
            lines.append(
                f"{OURS} takes {share:.3f} of the time of {THEIRS}, {ours['ranks']} ranks on {backend}; "
                f"to reach: {NEAR:g} at most"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, nargs="+", default=[2, 4], help="ranks (default: 2 4)")
    parser.add_argument("--rounds", type=int, default=20, help="default: 20")
    parser.add_argument("-o", type=Path, metavar="FILE", help="JSON file")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing, print the table of these results")
    arguments = parser.parse_args()
    if arguments.read:
        print(table(json.loads(arguments.read.read_text())["measurements"]))
        sys.exit()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.n:
            torch.multiprocessing.spawn(main, args=(size, folder, arguments.rounds), nprocs=size)
            rows += json.loads(Path(folder, f"{size}.json").read_text())
    print(table(rows))
    if arguments.o:
        versions = {"torch": torch.__version__, "ringcomm": ringcomm.__version__}
        facts = {**asdict(Machine.here()), **versions, "rounds": arguments.rounds}
        arguments.o.write_text(json.dumps({"machine": facts, "measurements": rows}, indent=1) + "\n")
