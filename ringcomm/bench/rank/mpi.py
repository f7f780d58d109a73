"""Open MPI or MPICH, through mpi4py; MPI4PY_RC_THREAD_LEVEL sets the thread level."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mpi4py
from mpi4py import MPI

from .collectives import COLLECTIVES, REDUCTIONS, Array, RankCase
from .library import HostBuffers, Library

THREADS = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in ("single", "funneled", "serialized", "multiple")}
OPS = {name: getattr(MPI, name.upper()) for name in REDUCTIONS if name != "avg"}


def send_buffer(case: RankCase, x: Any) -> Any:
    return MPI.IN_PLACE if case.in_place else x


def at_root(case: RankCase, here: Any, elsewhere: Any = None) -> Any:
    return here if case.rank == case.root else elsewhere


# (case, source, target, op) -> the method of a communicator, and its arguments
CALLS: dict[str, Callable[[RankCase, Any, Any, Any], tuple[str, tuple[Any, ...]]]] = {
    "all_reduce": lambda s, x, out, op: ("Allreduce", (send_buffer(s, x), x if out is None else out, op)),
    "reduce_scatter": lambda s, x, out, op: (
        "Reduce_scatter_block",
        (send_buffer(s, x), x if s.in_place else out, op),
    ),
    "all_gather": lambda s, x, out, op: ("Allgather", (send_buffer(s, x), out)),
    "broadcast": lambda s, x, out, op: ("Bcast", (x, s.root)),
    "reduce": lambda s, x, out, op: (
        "Reduce",
        (at_root(s, send_buffer(s, x), x), at_root(s, x if out is None else out), op, s.root),
    ),
    "gather": lambda s, x, out, op: ("Gather", (at_root(s, send_buffer(s, x), x), at_root(s, out), s.root)),
    "scatter": lambda s, x, out, op: ("Scatter", (at_root(s, x), at_root(s, send_buffer(s, out), out), s.root)),
    "all_to_all": lambda s, x, out, op: ("Alltoall", (x, out)),
    "send_recv": lambda s, x, out, op: ("Sendrecv", (x, s.right, 0, out, s.left, 0)),
    "barrier": lambda s, x, out, op: ("Barrier", ()),
}


class MpiLibrary(Library):
    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.buffers = HostBuffers()
        self.barrier = self.comm.Barrier
        self.versions = {
            "MPI": MPI.Get_library_version().split(",")[0].splitlines()[0].strip(),
            "mpi4py": mpi4py.__version__,
            "threads": THREADS[MPI.Query_thread()],
            **self.buffers.versions,
        }

    def call(
        self, collective: str, case: RankCase, x: Array, out: Array | None, asynchronous: bool
    ) -> tuple[Callable[[], object], Array]:
        if COLLECTIVES[collective].reduces and case.op not in OPS:
            raise ValueError(f"MPI has no operation {case.op}")
        method, arguments = CALLS[collective](case, x, out, OPS.get(case.op))
        result = x if out is None else out
        if collective == "reduce_scatter" and case.in_place:
            result = x[0]  # as MPI defines in place
        if not asynchronous:
            return partial(getattr(self.comm, method), *arguments), result
        start = partial(getattr(self.comm, "I" + method.lower()), *arguments)
        return lambda: start().Wait(), result

    def close(self) -> None:
        """mpi4py finalizes MPI when this process ends."""


def start(*_: str) -> MpiLibrary:
    return MpiLibrary()
