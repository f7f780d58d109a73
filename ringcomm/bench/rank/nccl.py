"""NCCL, through CuPy."""

import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import cupy
from cupy.cuda import nccl

from .collectives import COLLECTIVES, RankCase
from .cuda import CudaBuffers
from .library import Library

if not nccl.available:
    raise ImportError("CuPy finds no NCCL: pip install 'ringcomm[cuda13]', or 'ringcomm[cuda12]'")

SHARED_GPU = 23003  # the first version in which several ranks may use one GPU
TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
DTYPES = {name: getattr(nccl, f"NCCL_{name.upper()}") for name in TYPES}
OPS = {name: getattr(nccl, f"NCCL_{name.upper()}") for name in ("sum", "prod", "min", "max", "avg")}

Transfers = Iterable[tuple[int, int]]  # (address, peer)


class NcclLibrary(Library):
    def __init__(self, rank: int, size: int, folder: str) -> None:
        self.rank, self.size = rank, size
        self.buffers = CudaBuffers(rank)
        version = nccl.get_version()
        text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        if size > self.buffers.gpus:
            if version < SHARED_GPU:
                raise RuntimeError(f"NCCL {text} supports one rank per GPU; several need 2.30.3")
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        self.comm = nccl.NcclCommunicator(size, unique_id(rank, folder), rank)
        self.flag = cupy.zeros(1, cupy.int32)
        self.versions = {"NCCL": text, **self.buffers.versions}

    def call(
        self,
        collective: str,
        case: RankCase,
        x: Any,
        out: Any,
        asynchronous: bool,  # noqa: ARG002 (all calls are)
    ) -> tuple[Callable[[], object], Any]:
        if case.dtype.name not in DTYPES:
            raise ValueError(f"NCCL has no {case.dtype.name}")
        if COLLECTIVES[collective].reduces and case.op not in OPS:
            raise ValueError(f"NCCL has no operation {case.op}")
        if collective == "barrier":
            raise ValueError("NCCL has no barrier")
        result = x if out is None else out
        return self.prepared(collective, case, x.data.ptr, result.data.ptr), result

    def prepared(self, collective: str, s: RankCase, x: int, out: int) -> Callable[[], object]:
        comm, stream = self.comm, cupy.cuda.get_current_stream().ptr
        count, dtype, op = s.count, DTYPES[s.dtype.name], OPS.get(s.op)
        block, here = s.count * s.dtype.itemsize, s.rank == s.root

        def exchange(sends: Transfers, receives: Transfers) -> None:
            nccl.groupStart()
            for address, peer in sends:
                comm.send(address, count, dtype, peer, stream)
            for address, peer in receives:
                comm.recv(address, count, dtype, peer, stream)
            nccl.groupEnd()

        def blocks(begin: int) -> list[tuple[int, int]]:
            return [(begin + rank * block, rank) for rank in range(s.size)]

        match collective:
            case "all_reduce":
                return partial(comm.allReduce, x, out, count, dtype, op, stream)
            case "reduce_scatter":
                return partial(comm.reduceScatter, x, out, count, dtype, op, stream)
            case "all_gather":
                return partial(comm.allGather, x, out, count, dtype, stream)
            case "broadcast":
                return partial(comm.broadcast, x, out, count, dtype, s.root, stream)
            case "reduce":
                return partial(comm.reduce, x, out, count, dtype, op, s.root, stream)
            # CuPy does not wrap these three of NCCL 2.28, which are groups of sends and receives too.
            case "gather":
                return partial(exchange, [(x, s.root)], blocks(out) if here else [])
            case "scatter":
                return partial(exchange, blocks(x) if here else [], [(out, s.root)])
            case "all_to_all":
                return partial(exchange, blocks(x), blocks(out))
        return partial(exchange, [(x, s.right)], [(out, s.left)])

    def barrier(self) -> None:
        address = self.flag.data.ptr
        stream = cupy.cuda.get_current_stream()
        self.comm.allReduce(address, address, 1, nccl.NCCL_INT32, nccl.NCCL_SUM, stream.ptr)
        stream.synchronize()

    def close(self) -> None:
        self.comm.destroy()


def unique_id(rank: int, folder: str) -> bytes:
    """Return the unique id that rank 0 has created, from a file."""
    path = Path(folder, "nccl")
    if rank == 0:
        path.with_suffix(".new").write_bytes(nccl.get_unique_id())
        path.with_suffix(".new").rename(path)
    while not path.exists():  # the bench kills the ranks at its timeout
        time.sleep(0.01)
    return path.read_bytes()


def start(folder: str, _: str) -> NcclLibrary:
    # Set by `ringcomm run`, which starts these ranks.
    return NcclLibrary(int(os.environ["RINGCOMM_RANK"]), int(os.environ["RINGCOMM_SIZE"]), folder)
