"""Measure training steps of ringcomm.parallel on ringcomm and on Gloo, in turns; print the table of docs/parallel.md.

    python benchmarks/parallel.py [-n 2 4]

Needs torch. All ranks are on one axis. The steps are: replicas of a model of 25 million parameters with 16 rows each,
with DataParallel and with torch's DistributedDataParallel; the same replicas with AdamW, with DataParallel and with
ShardedOptimizer, stages 1 and 2; a tensor-parallel GPT, with a small and a large batch; the
same GPT as a 1F1B pipeline with 8 micro-batches. A step is forward, backward and optimizer; a figure is the median
over the rounds of the slowest rank. Where possible a backend that sends nothing takes turns too: its time is the limit.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn
from torch.multiprocessing.spawn import spawn

from ringcomm.parallel import (
    Axis,
    DataParallel,
    GPTConfig,
    Grid,
    Pipeline,
    ShardedOptimizer,
    gpt_loss,
    gpt_stages,
    make_schedule,
)
from torch_backend import BACKENDS, alternate, distributed, join, layers, optimizer_step, training  # beside this file

Step = Callable[[], object]

GPT = GPTConfig(vocab_size=1024, context=128, layers=4, hidden=256, heads=8, tied=False)
ROWS = torch.randn(16, 1024)
FEW, MANY = 1, 8  # sequences of a batch
SECONDS = 0.3  # of each step in a round
OURS, THEIRS = "DataParallel", "DistributedDataParallel"
ADAMW = "DataParallel and AdamW"
TENSOR = {f"tensor, {sequences} x {GPT.context} tokens": sequences for sequences in (FEW, MANY)}
PIPELINE = f"pipeline, {MANY} x {GPT.context} tokens"
NOTHING = "fake"  # torch's backend that sends nothing: its results are wrong, its time is the limit


def grid_of(axis: str, backend: str) -> Grid:
    """Return a grid with all ranks on one axis of a backend."""
    grid, ranks = Grid.alone(), range(dist.get_world_size())
    group = dist.new_group(backend=backend)
    for name in {axis, f"{axis}_cp", "world"}.intersection(vars(grid)):  # dp_cp: the ranks that average gradients
        setattr(grid, name, Axis(name, len(ranks), dist.get_rank(), tuple(ranks), group))
    return grid


def replicas(backend: str) -> Step:
    model = layers()
    return training(model, DataParallel(model, grid_of("dp", backend).dp).finish_grad_sync)


def replicas_of_torch(backend: str) -> Step:
    return training(distributed(dist.new_group(backend=backend)))


def replicas_with_adamw(backend: str) -> Step:
    model = layers()
    average, optimizer = (
        DataParallel(model, grid_of("dp", backend).dp),
        torch.optim.AdamW(model.parameters(), fused=True),
    )

    def step() -> None:
        model(ROWS).square().mean().backward()
        average.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()

    return step


def zero(backend: str, stage: int) -> Step:
    model = layers()
    factory = partial(torch.optim.AdamW, fused=True)
    optimizer = ShardedOptimizer(model, grid_of("dp", backend), factory, stage=stage, units=model.children())

    def step() -> None:
        model(ROWS).square().mean().backward()
        optimizer.finish_grad_sync()
        optimizer.step()

    return step


def tensor(backend: str, sequences: int) -> Step:
    grid = grid_of("tp", backend)
    (model,) = gpt_stages(GPT, grid)
    (inputs, targets), loss, end = batch_of(sequences), gpt_loss(GPT, grid), optimizer_step(model)

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
    batch, end = batch_of(MANY), optimizer_step(stages[0])

    def step() -> None:
        pipe.step(*batch)
        end()

    return step


def backends(step: str) -> tuple[str, ...]:
    """Return the backends to measure a step on; pipelines and torch's DDP need one that sends."""
    return BACKENDS if step in (PIPELINE, THEIRS) else (*BACKENDS, NOTHING)


def batch_of(sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(GPT.vocab_size, (sequences, GPT.context + 1), generator=draw)
    return ids[:, :-1], ids[:, 1:]


def main(rank: int, size: int, folder: str, rounds: int) -> None:
    join(rank, size, folder)
    steps: list[dict[str, Callable[[str], Step]]] = [  # the steps of an element take turns
        {OURS: replicas, THEIRS: replicas_of_torch},
        {
            ADAMW: replicas_with_adamw,
            **{f"ShardedOptimizer, stage {stage}": partial(zero, stage=stage) for stage in (1, 2)},
        },
        *[{name: partial(tensor, sequences=sequences)} for name, sequences in TENSOR.items()],  # type: ignore[list-item]
        {PIPELINE: pipeline},
    ]
    for makers in steps:
        calls = {f"{name} {backend}": make(backend) for name, make in makers.items() for backend in backends(name)}
        figures = alternate(calls, SECONDS, rounds)
        for name in makers:
            ours, gloo = (figures[f"{name} {backend}"] for backend in BACKENDS)
            limit = f"{gloo / figures[f'{name} {NOTHING}']:.2f}" if NOTHING in backends(name) else ""
            if rank == 0:
                cells = f"{ours * 1e3:.1f} | {gloo * 1e3:.1f} | {gloo / ours:.2f} | {limit}"
                print(f"| {name} | {size} | {cells} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, nargs="+", default=[2, 4], help="ranks (default: 2 4)")
    parser.add_argument("--rounds", type=int, default=20, help="default: 20")
    arguments = parser.parse_args()
    print("| Step | Ranks | ringcomm, ms | Gloo, ms | Speedup | Limit |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.n:
            spawn(main, args=(size, folder, arguments.rounds), nprocs=size)
