"""all_reduce and DDP of torch on GPUs, on ringcomm or on NCCL: the table of docs/gpu.md.

torchrun --standalone --nproc-per-node 2 benchmarks/gpu/torch_speed.py --backend ringcomm [--rows FILE]
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # also with PYTHONSAFEPATH

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpu.rows import Rows

SIZES = [4, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28]
GRAPHS = 1 << 24  # bytes up to which a graph is captured
CALLS, ROUNDS, GRAPH = 20, 10, 10
WIDTH, LAYERS, STEPS = 4096, 3, 10  # 50 million parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ringcomm", help="ringcomm or nccl (default: ringcomm)")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="rank 0 appends its rows to FILE, as JSON lines")
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    rows = Rows(options.rows if dist.get_rank() == 0 else None, check="torch", library=options.backend)
    for size in SIZES:
        row = all_reduce(size)
        if dist.get_rank() == 0:
            rows.add(bytes=size, **row)
    row = ddp()
    if dist.get_rank() == 0:
        rows.add(**row)
    dist.destroy_process_group()


def all_reduce(size: int) -> dict[str, float]:
    """Return microseconds: of the call itself, of queued calls, of one call alone, of one in a graph."""
    x, factor = torch.full((size // 4,), 1.0, device="cuda"), dist.get_world_size()
    dist.all_reduce(x)
    assert bool((x == factor).all()), x
    x.zero_()

    def call() -> None:
        dist.all_reduce(x)

    def queue() -> None:
        for _ in range(CALLS):
            call()

    host = []
    for _ in range(ROUNDS):
        meet()
        host += [seconds(call) for _ in range(CALLS)]
    found = {
        "host_us": median(host),
        "queued_us": repeated(queue) / CALLS,
        "alone_us": repeated(call),
    }
    if size <= GRAPHS:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(GRAPH):
                call()
        found["graph_us"] = repeated(captured.replay) / GRAPH
    return {name: round(1e6 * value, 1) for name, value in found.items()}


def ddp() -> dict[str, Any]:
    """Return the milliseconds of a training step, with and without communication: least, median, most."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()
    wrapped, x = DistributedDataParallel(model), torch.randn(16, WIDTH, device="cuda")
    found: dict[str, Any] = {"parameters": sum(each.numel() for each in model.parameters())}
    for name, module in (("ddp_ms", wrapped), ("without_ms", model)):

        def step(module: torch.nn.Module = module) -> None:
            module(x).square().mean().backward()
            torch.cuda.synchronize()

        step()
        meet()
        times = sorted(seconds(step) for _ in range(STEPS))
        found[name] = [round(1e3 * value, 2) for value in (times[0], median(times), times[-1])]
    return found


def repeated(call: Callable[[], object]) -> float:
    """Return the median seconds of rounds that all ranks start together, until the GPU is done."""

    def once() -> None:
        call()
        torch.cuda.synchronize()

    once()
    times = []
    for _ in range(ROUNDS):
        meet()
        times.append(seconds(once))
    return median(times)


def meet() -> None:
    dist.barrier()
    torch.cuda.synchronize()


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
