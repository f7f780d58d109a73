"""A program as a user writes it, for `mypy --strict`: the types that the public API promises, and mistakes it refuses.

An unused "type: ignore" is an error, so each one here is a mistake that mypy must find. test_annotations.py runs it.
"""

from typing import Any, assert_type

import numpy as np

import ringcomm
from ringcomm import Communicator, Config, Work


def program(comm: Communicator) -> float:
    """Use the calls of a communicator; return the sum of rank + 1 over its ranks."""
    assert_type(comm.rank, int)
    assert_type(comm.size, int)
    x = np.full(4, comm.rank + 1, np.float32)
    comm.all_reduce(x, op="sum", timeout=20)
    table: np.ndarray[Any, Any] = comm.all_gather(x)
    work: Work = comm.barrier(async_op=True)
    work.wait()
    assert_type(comm.all_gather_object(comm.rank), list[Any])
    part = comm.split(comm.rank)
    assert_type(part, Communicator | None)
    assert part is not None
    part.close()
    assert_type(comm.report(1), str)
    assert table.shape == (comm.size, 4)
    return float(x[0])


def starts() -> list[float]:
    """Start ranks in two ways; not called."""
    config = Config(timeout=30, transport="shm")
    with ringcomm.init(config=config) as comm:
        program(comm)
    try:
        return ringcomm.launch(program, 2)
    except ringcomm.PeerLost as error:
        assert_type(error.rank, int | None)
        raise


def mistakes(comm: Communicator) -> None:
    """Make calls that mypy refuses; not called."""
    comm.all_reduce(np.zeros(1), timeout="soon")  # type: ignore[arg-type]
    comm.all_reduce()  # type: ignore[call-arg]
    comm.allreduce(np.zeros(1))  # type: ignore[attr-defined]
    Config(time_out=30)  # type: ignore[call-arg]
    ringcomm.launch(program, "2")  # type: ignore[arg-type]
