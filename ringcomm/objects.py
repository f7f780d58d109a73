"""Collectives of Python objects, on top of those of arrays: one call for the sizes, one for the pickled bytes."""

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringcomm.errors import RingcommError, describe_error

__all__ = ["all_gather", "broadcast", "gather"]

FAILED = -1  # the size of an object that could not be pickled

# `comm` is a Communicator; its methods document these functions.


def broadcast(comm: Any, obj: Any, root: int, timeout: float | None) -> Any:
    is_root = comm.rank == root
    data: Any = None
    error: Exception | None = None
    if is_root:
        data, error = _pickled(obj)
    size = np.array(FAILED if data is None else data.size)
    comm.broadcast(size, root, timeout=timeout)
    _check_pickled(comm, {root: size}, error)
    if not is_root:
        data = np.empty(size, np.uint8)
    comm.broadcast(data, root, timeout=timeout)
    return obj if is_root else pickle.loads(data)


def all_gather(comm: Any, obj: Any, timeout: float | None) -> list[Any]:
    data, sizes = _pickled_everywhere(comm, obj, timeout)
    return _unpickled(comm.all_gather(data, counts=sizes, timeout=timeout), sizes)


def gather(comm: Any, obj: Any, root: int, timeout: float | None) -> list[Any] | None:
    data, sizes = _pickled_everywhere(comm, obj, timeout)
    gathered = comm.gather(data, root=root, counts=sizes, timeout=timeout)
    return None if gathered is None else _unpickled(gathered, sizes)


def _pickled_everywhere(comm: Any, obj: Any, timeout: float | None) -> tuple[Any, Any]:
    """Return the pickled object, and the sizes on all ranks."""
    data, error = _pickled(obj)
    sizes = comm.all_gather(np.array(FAILED if data is None else data.size), timeout=timeout)
    _check_pickled(comm, dict(enumerate(sizes)), error)
    return data, sizes


def _pickled(obj: Any) -> tuple[Any, Exception | None]:
    """Return the pickled object, or the error; the other ranks have to learn of it before this rank raises it."""
    try:
        return np.frombuffer(pickle.dumps(obj, protocol=5), np.uint8), None
    except Exception as error:
        return None, error


def _check_pickled(comm: Any, sizes: Mapping[int, Any], error: Exception | None) -> None:
    if error is not None:
        text = f"rank {comm.rank} could not pickle its object: {describe_error(error)}"
        raise RingcommError(text, rank=comm.rank) from error
    for rank, size in sizes.items():
        if size == FAILED:
            raise RingcommError(f"rank {rank} could not pickle its object, and raised the reason", rank=rank)


def _unpickled(data: Any, sizes: Any) -> list[Any]:
    ends = np.cumsum(sizes)
    return [pickle.loads(data[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
