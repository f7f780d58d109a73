"""Measure training steps of ringcomm.parallel on ringcomm and on Gloo, in the same processes, in turns.

    python benchmarks/parallel.py [-n 2 4] [-o results/FOLDER/parallel.json]
    python benchmarks/parallel.py --read results/FOLDER/parallel.json     print its table

Needs torch. All ranks are on one axis. The steps are: replicas of a model of 25 million parameters with 16 rows each,
with DataParallel and with torch's DistributedDataParallel; a tensor-parallel GPT, with a small and a large batch; the
same GPT as a 1F1B pipeline with 8 micro-batches. A step is forward, backward and optimizer; a figure is the median
over the rounds of the slowest rank. Where possible a backend that sends nothing takes turns too: its time is the limit.
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
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

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
from torch_backend import BACKENDS, alternate  # beside this file

Step = Callable[[], object]

GPT = GPTConfig(vocab_size=1024, context=128, layers=4, hidden=256, heads=8, tied=False)
FEW, MANY = 1, 8  # sequences of a batch
SECONDS = 0.3  # of each step in a round
OURS, THEIRS = "DataParallel", "DistributedDataParallel"
TENSOR = {f"tensor, {sequences} x {GPT.context} tokens": sequences for sequences in (FEW, MANY)}
PIPELINE = f"pipeline, {MANY} x {GPT.context} tokens"
NOTHING = "fake"  # torch's backend that sends nothing: its results are wrong, its time is the limit


def grid_of(axis: str, backend: str) -> Grid:
    """Return a grid with all ranks on one axis of a backend."""
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
        finish = DataParallel(model, dp).finish_grad_sync
    x, end = torch.randn(16, 1024), optimizer_step(model.parameters())

    def step() -> None:
        model(x).square().mean().backward()
        finish()
        end()

    return step


def tensor(backend: str, sequences: int) -> Step:
    grid = grid_of("tp", backend)
    (model,) = gpt_stages(GPT, grid)
    (inputs, targets), loss, end = batch_of(sequences), gpt_loss(GPT, grid), optimizer_step(model.parameters())

    def step() -> None:
        torch.autograd.backward(loss(model(inputs), targets))
        end()

    return step


@cache
def pipeline_stages() -> Sequence[nn.Module]:
    """Return this rank's stages, shared by all backends, because the times of two copies of a model differ by 2 %."""
    return gpt_stages(GPT, grid_of("pp", "ringcomm"))


def pipeline(backend: str) -> Step:
    grid, stages = grid_of("pp", backend), pipeline_stages()
    pipe = Pipeline(grid, stages, make_schedule("1f1b", grid.pp.size, MANY), gpt_loss(GPT, grid))
    batch, end = batch_of(MANY), optimizer_step(stages[0].parameters())

    def step() -> None:
        pipe.step(*batch)
        end()

    return step


def backends(step: str) -> tuple[str, ...]:
    """Return the backends to measure a step on; pipelines and torch's DDP need one that sends."""
    return BACKENDS if step in (PIPELINE, THEIRS) else (*BACKENDS, NOTHING)


def optimizer_step(parameters: Iterable[nn.Parameter]) -> Step:
    """Return a function that runs the optimizer and zeros the gradients."""
    optimizer = torch.optim.SGD(parameters, lr=1e-4)

    def end() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return end


def batch_of(sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(GPT.vocab_size, (sequences, GPT.context + 1), generator=draw)
    return ids[:, :-1], ids[:, 1:]


def main(rank: int, size: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("ringcomm", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)
    steps: list[dict[str, Callable[[str], Step]]] = [  # the steps of an element take turns
        {OURS: partial(replicas, torchs=False), THEIRS: partial(replicas, torchs=True)},
        *[{name: partial(tensor, sequences=sequences)} for name, sequences in TENSOR.items()],  # type: ignore[list-item]
        {PIPELINE: pipeline},
    ]
    rows = []
    for makers in steps:
        calls = {f"{name} {backend}": make(backend) for name, make in makers.items() for backend in backends(name)}
        figures = alternate(calls, SECONDS, rounds)
        for name in makers:
            times = {backend: figures[f"{name} {backend}"] for backend in backends(name)}
            rows.append({"step": name, "ranks": size, **times})
    if rank == 0:
        Path(folder, f"{size}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def ratio(row: dict[str, Any]) -> float:
    speedup: float = row["gloo"]["median"] / row["ringcomm"]["median"]
    return speedup


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    heads = ("Step", "Ranks", "ringcomm, ms", "Gloo, ms", "Speedup", "Limit")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        times = " | ".join(f"{row[backend]['median'] * 1e3:.1f}" for backend in BACKENDS)
        limit = f"{row['gloo']['median'] / row[NOTHING]['median']:.2f}" if NOTHING in row else ""
        lines.append(f"| {row['step']} | {row['ranks']} | {times} | {ratio(row):.2f} | {limit} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, nargs="+", default=[2, 4], help="ranks (default: 2 4)")
    parser.add_argument("--rounds", type=int, default=20, help="default: 20")
    parser.add_argument("-o", type=Path, metavar="FILE", help="JSON file")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print the table of these results, without measuring")
    arguments = parser.parse_args()
    if arguments.read:
        print(table(json.loads(arguments.read.read_text())["measurements"]))
        sys.exit()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.n:
            spawn(main, args=(size, folder, arguments.rounds), nprocs=size)
            rows += json.loads(Path(folder, f"{size}.json").read_text())
    print(table(rows))
    if arguments.o:
        versions = {"torch": torch.__version__, "ringcomm": ringcomm.__version__}
        facts = {**asdict(Machine.here()), **versions, "rounds": arguments.rounds}
        arguments.o.write_text(json.dumps({"machine": facts, "measurements": rows}, indent=1) + "\n")
