"""What programs look at of the internals of mpi4py.futures, which are not there: the pools are ringcomm's own."""

from typing import Any

from ringcomm.mpi4py import MPI
from ringcomm.mpi4py.futures import BrokenExecutor, pool

__all__ = ["MPI", "BrokenExecutor"]


def __getattr__(name: str) -> Any:
    if name == "SharedPool":  # None unless the program runs under `python -m mpi4py.futures`
        return pool._shared
    raise AttributeError(f"mpi4py.futures._core.{name}: the pools of ringcomm have not got the internals of mpi4py's")
