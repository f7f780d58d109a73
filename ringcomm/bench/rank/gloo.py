"""torch.distributed with one of its backends; started as a library, that is Gloo."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from .collectives import REDUCTIONS, Array, RankCase
from .library import HostBuffers, Library

OPS = {name: getattr(dist.ReduceOp, "PRODUCT" if name == "prod" else name.upper()) for name in REDUCTIONS}


def tensor(array: Array) -> torch.Tensor:
    if array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):  # torch does not accept those of ml_dtypes
        same_size = np.dtype(f"uint{8 * array.itemsize}")
        return torch.from_numpy(array.view(same_size)).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def copied_in_place(operation: Callable[..., Any], x: torch.Tensor, out: torch.Tensor | None, op: Any) -> Any:
    """torch.distributed has no out-of-place form of these: the copy is part of the call."""
    if out is None:
        return lambda **options: operation(x, op=op, **options)

    def call(**options: Any) -> Any:
        out.copy_(x)
        return operation(out, op=op, **options)

    return call


def exchange(s: RankCase, x: torch.Tensor, out: Any) -> Callable[[], object]:
    def call() -> None:
        works = dist.isend(x, s.right), dist.irecv(out, s.left)
        for work in works:
            work.wait()  # type: ignore[union-attr]  # None outside the group

    return call


def listed(s: RankCase, x: torch.Tensor | None) -> list[torch.Tensor] | None:
    return list(x) if s.rank == s.root and x is not None else None


# (case, source, target, op) -> the call, which takes async_op
CALLS: dict[str, Callable[[RankCase, Any, Any, Any], Callable[..., Any]]] = {
    "all_reduce": lambda s, x, out, op: copied_in_place(dist.all_reduce, x, out, op),
    "reduce_scatter": lambda s, x, out, op: partial(dist.reduce_scatter_tensor, out, x.view(-1), op=op),
    "all_gather": lambda s, x, out, op: partial(dist.all_gather_into_tensor, out.view(-1), x),
    "broadcast": lambda s, x, out, op: partial(dist.broadcast, x, s.root),
    "reduce": lambda s, x, out, op: copied_in_place(partial(dist.reduce, dst=s.root), x, out, op),
    "gather": lambda s, x, out, op: partial(dist.gather, x, listed(s, out), s.root),
    "scatter": lambda s, x, out, op: partial(dist.scatter, out, listed(s, x), s.root),
    "all_to_all": lambda s, x, out, op: partial(dist.all_to_all_single, out, x),
    "barrier": lambda s, x, out, op: dist.barrier,
}


class TorchLibrary(Library):
    def __init__(self, backend: str, folder: str, timeout: float | None = None) -> None:
        self.buffers = HostBuffers()
        torch.set_num_threads(1)
        where: dict[str, Any] = {}  # as torchrun has set
        if folder:  # `ringcomm run` has started these ranks
            rank, size = int(os.environ["RINGCOMM_RANK"]), int(os.environ["RINGCOMM_SIZE"])
            where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": size}
        if timeout is not None:  # instead of half an hour; Gloo waits five times as long for a connection
            where["timeout"] = timedelta(seconds=timeout / 5)
        dist.init_process_group(backend, **where)
        distributed_c10d._set_pg_timeout(default_pg_timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barrier = dist.barrier
        self.versions = {"torch": torch.__version__, **self.buffers.versions}

    def call(
        self, collective: str, case: RankCase, x: Array, out: Array | None, asynchronous: bool
    ) -> tuple[Callable[[], object], Array]:
        result = x if out is None else out
        target = None if out is None else tensor(out)
        if collective == "send_recv":
            return exchange(case, tensor(x), target), result
        call = CALLS[collective](case, tensor(x), target, OPS[case.op])
        return (lambda: call(async_op=True).wait()) if asynchronous else call, result

    def close(self) -> None:
        dist.destroy_process_group()


def start(folder: str, _: str, timeout: float | None = None) -> TorchLibrary:
    return TorchLibrary("gloo", folder, timeout)
