"""Measure the torch.distributed backend in turns with Gloo, in the same processes.

    python benchmarks/torch_backend.py [-o results/FOLDER/torch.json] [-n RANKS]
    python benchmarks/torch_backend.py --read results/FOLDER/torch.json     print the tables of docs/torch.md

Needs torch. Each size is measured in rounds that alternate between the backends; a figure is the median over the rounds
of the slowest rank. "A step" is forward, backward and optimizer of a model of 25 million parameters under
DistributedDataParallel; its communication is the time beyond that of the same step with a hook that divides each bucket
by the number of ranks, as DDP itself does, and sends nothing.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import ringcomm
from ringcomm.bench.machine import Machine

BACKENDS = ("ringcomm", "gloo")
SIZES = [4 << shift for shift in range(0, 25, 2)]  # bytes: 4 B to 64 MiB
SHOWN = [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
ROUNDS = 15


def collectives(size: int) -> dict[str, Callable[[int, object], Callable[[], object]]]:
    def all_reduce(count: int, group: object) -> Callable[[], object]:
        x = torch.zeros(count)
        return lambda: dist.all_reduce(x, group=group)

    def all_gather_into_tensor(count: int, group: object) -> Callable[[], object]:
        x, out = torch.ones(max(1, count // size)), torch.empty(max(1, count // size) * size)
        return lambda: dist.all_gather_into_tensor(out, x, group=group)

    def reduce_scatter_tensor(count: int, group: object) -> Callable[[], object]:
        x, out = torch.ones(max(1, count // size) * size), torch.empty(max(1, count // size))
        return lambda: dist.reduce_scatter_tensor(out, x, group=group)

    return {each.__name__: each for each in (all_reduce, all_gather_into_tensor, reduce_scatter_tensor)}


def timed(call: Callable[[], object], calls: int) -> float:
    """Return the seconds of one call, on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    spent = torch.tensor((time.perf_counter() - begin) / calls, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def alternate(
    calls: dict[str, Callable[[], object]], seconds: float = 0.05, rounds: int = ROUNDS
) -> dict[str, dict[str, float]]:
    """Return median, p10 and p90 of each call, measured in turns of `seconds`."""
    repeat = {}
    for name, call in calls.items():
        timed(call, 5)
        repeat[name] = max(2, min(2000, int(seconds / timed(call, 5))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call, repeat[name]))
    return {
        name: {"median": statistics.median(each), "p10": sorted(each)[len(each) // 10], "p90": sorted(each)[-2]}
        for name, each in times.items()
    }


def steps(groups: dict[str, object]) -> dict[str, dict[str, float]]:
    """Return the times of a training step on each backend, and without communication."""
    calls = {name: training(group) for name, group in groups.items()}
    calls["alone"] = training(groups["ringcomm"], silent=True)
    return alternate(calls, 0.2, 40)


def training(group: object, silent: bool = False) -> Callable[[], object]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(3)]
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers), process_group=group, gradient_as_bucket_view=True
    )
    if silent:
        model.register_comm_hook(None, send_nothing)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(16, 1024)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def send_nothing(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().div_(dist.get_world_size()))
    return future


def main(rank: int, size: int, folder: str, output: str) -> None:
    machine = asdict(Machine.here())  # before this rank is bound to a core
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("ringcomm", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    groups = {"ringcomm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rows: list[dict[str, Any]] = []
    for name, make in collectives(size).items():
        for count in (size // 4 for size in SIZES):
            figures = alternate({backend: make(count, groups[backend]) for backend in BACKENDS})
            rows.append({"call": name, "bytes": 4 * count, "ranks": size, **figures})
            if rank == 0:
                print(line(rows[-1]), flush=True)
    figures = steps(groups)
    share = {name: 1 - figures["alone"]["median"] / figures[name]["median"] for name in BACKENDS}
    if rank == 0:
        rows.append({"call": "step", "ranks": size, **figures, "share": share})
        print(step_line(rows[-1]))
        if output:
            facts = {**machine, "torch": torch.__version__, "ringcomm": ringcomm.__version__}
            Path(output).write_text(json.dumps({"machine": facts, "measurements": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def ratio(row: dict[str, Any]) -> float:
    return float(row["gloo"]["median"] / row["ringcomm"]["median"])


def line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {row[name]['median'] * 1e6:10.1f} us" for name in BACKENDS)
    return f"{row['call']:24}{row['bytes']:>10} B  {times}  {ratio(row):6.1f} x"


def step_line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {row[name]['median'] * 1e3:.1f} ms" for name in (*BACKENDS, "alone"))
    shares = ", ".join(f"{name} {share:.1%}" for name, share in row["share"].items())
    return f"a training step: {times}; communication: {shares}"


def tables(data: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = [row for row in data["measurements"] if row["call"] != "step" and row["bytes"] in SHOWN]
    lines = [f"| {' | '.join(['µs, ringcomm / gloo', *map(size_words, SHOWN)])} |", "|---" * (len(SHOWN) + 1) + "|"]
    for call in dict.fromkeys(row["call"] for row in rows):
        times = [
            " / ".join(f"{row[name]['median'] * 1e6:,.{1 if name == 'ringcomm' else 0}f}" for name in BACKENDS)
            for row in rows
            if row["call"] == call
        ]
        lines.append(f"| {' | '.join([call, *times])} |")
    step = next(row for row in data["measurements"] if row["call"] == "step")
    step_times = ", ".join(f"{name} {step[name]['median'] * 1e3:.0f} ms" for name in (*BACKENDS, "alone"))
    shares = " and ".join(f"{step['share'][name]:.0%}" for name in BACKENDS)
    return "\n".join([*lines, "", f"A training step: {step_times}; communication is {shares} of it."])


def size_words(size: int) -> str:
    return f"{size} B" if size < 1 << 10 else f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("-o", default="", help="JSON file")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print the tables of these results")
    arguments = parser.parse_args()
    if arguments.read:
        print(tables(json.loads(arguments.read.read_text())))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        spawn(main, args=(arguments.n, folder, arguments.o), nprocs=arguments.n)
