"""Measure the torch.distributed backend in turns with Gloo, in the same processes; print the tables of docs/torch.md.

    python benchmarks/torch_backend.py [-n RANKS]

Needs torch. Each size is measured in rounds that alternate between the backends; a figure is the median over the rounds
of the slowest rank. "A training step" is forward, backward and optimizer of a model of 25 million parameters under
DistributedDataParallel; its communication is the time beyond that of the same step with a hook that divides each bucket
by the number of ranks, as DDP itself does, and sends nothing.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from ringcomm.options import readable

BACKENDS = ("ringcomm", "gloo")
SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]  # bytes
ROUNDS = 15

Call = Callable[[], object]


def collectives(size: int) -> dict[str, Callable[[int, object], Call]]:
    def all_reduce(count: int, group: object) -> Call:
        x = torch.zeros(count)
        return lambda: dist.all_reduce(x, group=group)

    def all_reduce_async_and_wait(count: int, group: object) -> Call:
        x = torch.zeros(count)
        return lambda: dist.all_reduce(x, group=group, async_op=True).wait()

    def functional_all_reduce_and_wait(count: int, group: Any) -> Call:
        x, name, functional = torch.zeros(count), group.group_name, torch.ops._c10d_functional
        return lambda: functional.wait_tensor(functional.all_reduce(x, "sum", name))

    def all_gather_into_tensor(count: int, group: object) -> Call:
        x, out = torch.ones(max(1, count // size)), torch.empty(max(1, count // size) * size)
        return lambda: dist.all_gather_into_tensor(out, x, group=group)

    def reduce_scatter_tensor(count: int, group: object) -> Call:
        x, out = torch.ones(max(1, count // size) * size), torch.empty(max(1, count // size))
        return lambda: dist.reduce_scatter_tensor(out, x, group=group)

    all_reduces = all_reduce, all_reduce_async_and_wait, functional_all_reduce_and_wait
    named: Any = *all_reduces, all_gather_into_tensor, reduce_scatter_tensor
    return {each.__name__: each for each in named}


def timed(call: Call, calls: int) -> float:
    """Return the seconds of one call, on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    spent = torch.tensor((time.perf_counter() - begin) / calls, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def alternate(calls: dict[str, Call], seconds: float = 0.05, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the seconds of each call, measured in turns of `seconds`: the median of the rounds."""
    repeat = {}
    for name, call in calls.items():
        timed(call, 5)
        repeat[name] = max(2, min(2000, int(seconds / timed(call, 5))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call, repeat[name]))
    return {name: median(each) for name, each in times.items()}


def layers() -> nn.Module:
    """Return a model of 25 million parameters, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(3)))


def training(model: nn.Module, finish: Call = lambda: None) -> Call:
    """Return a step of training; `finish` waits for the gradients."""
    x, end = torch.randn(16, 1024), optimizer_step(model)

    def step() -> None:
        model(x).square().mean().backward()
        finish()
        end()

    return step


def optimizer_step(model: nn.Module) -> Call:
    """Return a function that runs the optimizer and zeros the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def end() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return end


def distributed(group: object) -> DistributedDataParallel:
    return DistributedDataParallel(layers(), process_group=group, gradient_as_bucket_view=True)


def send_nothing(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().div_(dist.get_world_size()))
    return future


def join(rank: int, size: int, folder: str) -> None:
    """Make this process a rank, on a core and a thread of its own."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("ringcomm", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)


def main(rank: int, size: int, folder: str) -> None:
    join(rank, size, folder)
    groups = {"ringcomm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    lines = [row("µs, ringcomm / gloo", map(readable, SIZES)), "|---" * (len(SIZES) + 1) + "|"]
    for name, make in collectives(size).items():
        times = [alternate({each: make(length // 4, groups[each]) for each in BACKENDS}) for length in SIZES]
        lines.append(row(name, (" / ".join(f"{one[each] * 1e6:,.1f}" for each in BACKENDS) for one in times)))
    alone = distributed(dist.group.WORLD)
    alone.register_comm_hook(None, send_nothing)
    models = {**{each: distributed(groups[each]) for each in BACKENDS}, "without communication": alone}
    steps = alternate({name: training(model) for name, model in models.items()}, 0.2, 40)
    times_of = ", ".join(f"{seconds * 1e3:.0f} ms {name}" for name, seconds in steps.items())
    shares = " and ".join(f"{1 - steps['without communication'] / steps[each]:.0%}" for each in BACKENDS)
    if rank == 0:
        print("\n".join([*lines, "", f"A training step: {times_of}; communication is {shares} of it."]))
    dist.destroy_process_group()


def row(name: str, cells: Any) -> str:
    return f"| {' | '.join([name, *cells])} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, help="ranks")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(main, args=(arguments.n, folder), nprocs=arguments.n)
