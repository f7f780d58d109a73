"""ringcomm, through its public API."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import ringcomm

from .collectives import Array, RankCase
from .library import HostBuffers, Library

# (communicator, case, source, target, options) -> the call
CALLS: dict[str, Callable[[ringcomm.Communicator, RankCase, Array, Any, dict[str, Any]], Callable[[], Any]]] = {
    "all_reduce": lambda comm, s, x, out, o: partial(comm.all_reduce, x, s.op, out, **o),
    "reduce_scatter": lambda comm, s, x, out, o: partial(comm.reduce_scatter, x, s.op, out, **o),
    "all_gather": lambda comm, s, x, out, o: partial(comm.all_gather, x, out, **o),
    "broadcast": lambda comm, s, x, out, o: partial(comm.broadcast, x, s.root, **o),
    "reduce": lambda comm, s, x, out, o: partial(comm.reduce, x, s.op, s.root, out, **o),
    "gather": lambda comm, s, x, out, o: partial(comm.gather, x, out, s.root, **o),
    "scatter": lambda comm, s, x, out, o: partial(comm.scatter, x if s.rank == s.root else None, out, s.root, **o),
    "all_to_all": lambda comm, s, x, out, o: partial(comm.all_to_all, x, out, **o),
    "send_recv": lambda comm, s, x, out, o: partial(comm.sendrecv, x, s.right, out, s.left, **o),
    "barrier": lambda comm, s, x, out, o: partial(comm.barrier, **o),
}


class EmulatedBuffers(HostBuffers):
    """Arrays of the emulated device, which are in host memory."""

    def memory(self, size: int, huge: bool) -> Any:
        from ringcomm.devices import emulated

        return super().memory(size, huge).view(emulated.Array)


def buffers_on(device: str, rank: int) -> HostBuffers:
    if device == "cuda":
        from .cuda import CudaBuffers  # needs CuPy

        return CudaBuffers(rank)
    return EmulatedBuffers() if device == "emulated" else HostBuffers()


class RingcommLibrary(Library):
    def __init__(self, comm: ringcomm.Communicator, device: str = "host") -> None:
        self.comm, self.device = comm, device
        self.buffers = buffers_on(device, comm.rank)
        self.rank, self.size = comm.rank, comm.size
        self.barrier = comm.barrier
        self.versions = {"ringcomm": ringcomm.__version__, **self.buffers.versions}

    def memory(self, kind: str, size: int) -> Array | None:
        if kind == "symmetric":
            buffer: Array = self.comm.empty((size,), np.uint8, self.device)
            return buffer
        if kind == "shared":
            with self.comm.shared_arrays():
                return np.ones(size, np.uint8)
        return None

    def call(
        self, collective: str, case: RankCase, x: Array, out: Array | None, asynchronous: bool
    ) -> tuple[Callable[[], object], Array]:
        call = CALLS[collective](self.comm, case, x, out, {"async_op": True} if asynchronous else {})
        return (lambda: call().wait()) if asynchronous else call, x if out is None else out

    def close(self) -> None:
        self.comm.close()


def start(_: str, device: str) -> RingcommLibrary:
    return RingcommLibrary(ringcomm.init(), device)
