"""The device `this`: what ranks on the CPU of this machine reach in torch, and in collectives of ringcomm."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from ringcomm import Communicator, Config, launch
from ringcomm.errors import ArgumentError
from ringcomm.machine import memory, topology
from ringcomm.plan.model.devices import Accelerator, Calibration
from ringcomm.plan.price.layer import CAUSAL, FUSED_BACKWARD

__all__ = ["measure"]

PRODUCT = 512  # rows and columns of the matrices that are multiplied
ELEMENTS = 1 << 18  # of the float32 arrays that are added: 1 MiB, as the activations of a small model
HEADS, SEQUENCE, WIDTH = 8, 256, 32  # of attention
SMALL, LARGE = 8, 4 << 20  # bytes that are all-reduced
SECONDS = 0.2  # of each measurement


def measure(ranks: int) -> Accelerator:
    """Return the device `this-<ranks>`, for so many ranks on this machine. It takes about 5 seconds.

    As many ranks compute at a time as there are processors; collectives are those of all ranks.

    Raises:
        ArgumentError: torch is missing.
    """
    Config()  # refuses what launch would refuse only on its ranks
    try:
        import torch  # noqa: F401 (only whether it is there)
    except ImportError:
        raise ArgumentError("--measure needs torch: pip install 'ringcomm[torch]'") from None
    cores = min(len(topology.cores()), topology.cpu_quota() or ranks)
    found = launch(_measure_rank, ranks, args=(max(1, int(cores)),))
    columns = list(zip(*(reached for reached, _ in found if reached), strict=True))
    flops, bandwidth, fused = (median(column) for column in columns[:3])
    small, large = (max(column) for column in zip(*(seconds for _, seconds in found), strict=True))
    steps = max(1, (ranks - 1).bit_length())  # of recursive doubling, which is best for small arrays
    share = 2 * (ranks - 1) / ranks  # of the array, which a rank sends
    return Accelerator(
        name=f"this-{ranks}",
        flops=flops,
        memory=memory.available().bytes / ranks,
        reserved=0,
        bandwidth=bandwidth,
        sms=1,
        tile=(1, 1),
        node=ranks,
        inside=share * LARGE / large if ranks > 1 else bandwidth,
        inside_latency=small / steps,
        between=bandwidth,
        between_latency=0,
        element=4,
        fused=fused / flops,
        overlap=0,
        asynchronous=False,
        ranks_per_core=max(1.0, ranks / cores),
        basis=f"measured on {ranks} ranks of this machine",
        calibration=Calibration(gemm=1, memory=1, launch=max(columns[3]), inside=1, between=1),
    )


def _measure_rank(comm: Communicator, cores: int) -> tuple[list[float], list[float]]:
    """Return what this rank reaches: FLOP/s of products, bytes/s, FLOP/s of attention and seconds of a layer's forward;
    nothing if it has no processor. And the seconds of a small and a large all-reduce.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(max(1, cores // comm.size))
    rates: list[float] = []
    if comm.rank < cores:
        x, y = torch.randn(PRODUCT, PRODUCT), torch.randn(PRODUCT, PRODUCT)
        a, b = torch.randn(ELEMENTS), torch.randn(ELEMENTS, requires_grad=True)
        heads = torch.randn(3, 1, HEADS, SEQUENCE, WIDTH, requires_grad=True)
        query, key, value = heads
        attend = functional.scaled_dot_product_attention
        attention = 4 * HEADS * SEQUENCE**2 * WIDTH * CAUSAL * (1 + FUSED_BACKWARD)
        layer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        tokens = torch.randn(1, 8, 16, requires_grad=True)
        rates = [
            2 * PRODUCT**3 / _seconds(lambda: torch.mm(x, y)),
            # The sum of a branch reads and writes 3, a GELU 2, its backward 3: those of the formulas.
            8 * a.nbytes / _seconds(lambda: torch.autograd.grad(a + functional.gelu(b), b, a)),
            attention / _seconds(lambda: torch.autograd.grad(attend(query, key, value, is_causal=True), heads, query)),
            _seconds(lambda: layer(tokens).sum().backward()) / 3,  # a backward launches twice as much
        ]
    comm.barrier()
    small, large = (np.zeros(size, np.uint8) for size in (SMALL, LARGE))
    return rates, [_all_reduce(comm, array) for array in (small, large)]


def _all_reduce(comm: Communicator, array: np.ndarray) -> float:
    """Return the seconds of an all-reduce, the same number of which runs on all ranks."""
    times = []
    for _ in range(50):
        start = time.perf_counter()
        comm.all_reduce(array, "max")
        times.append(time.perf_counter() - start)
    return min(times)


def _seconds(call: Callable[[], object]) -> float:
    """Return the least seconds of a call: other programs only take time."""
    call()
    times: list[float] = []
    while sum(times) < SECONDS:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
