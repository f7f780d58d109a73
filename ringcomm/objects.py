"""Collectives of Python objects, on top of those of arrays.

An object travels pickled in a record of fixed size; only if some object is longer a second call moves the bytes of all.
"""

import pickle
from collections.abc import Sequence
from functools import partial
from struct import Struct
from types import SimpleNamespace
from typing import Any

import numpy as np

from ringcomm.errors import RingcommError, describe_error

__all__ = ["all_gather", "all_to_all", "broadcast", "gather", "scatter"]

# A record is as in bindings/object_record.h, by which small objects take a faster way.
RECORD = 512  # bytes: a collective of this size takes hardly longer than one of 8
HEADER = Struct("=qq")  # the bytes of the object, and of the longest one of those that its rank sends
START = HEADER.size
ROOM = RECORD - START
BYTE = np.dtype(np.uint8)
FAILED = -1  # the size of an object that could not be pickled

PICKLE = SimpleNamespace(dumps=partial(pickle.dumps, protocol=5), loads=pickle.loads)

# `comm` is a Communicator; its methods document these functions. `codec` has `dumps` and `loads`.


def broadcast(comm: Any, obj: Any, root: int, timeout: float | None = None, codec: Any = PICKLE) -> Any:
    is_root = comm.rank == root
    data, error = _pickled(obj, codec) if is_root else (None, None)
    record: Any = _array(_record(data)) if is_root else np.empty(RECORD, np.uint8)
    comm.broadcast(record, root, timeout=timeout)
    size, _ = HEADER.unpack_from(record)
    if size == FAILED:
        raise _not_pickled(comm, root, error)
    if size > ROOM:
        content = _array(data) if is_root else np.empty(size, np.uint8)
        comm.broadcast(content, root, timeout=timeout)
    else:
        content = record[START : START + size]
    return obj if is_root else codec.loads(content)


def all_gather(comm: Any, obj: Any, timeout: float | None = None, codec: Any = PICKLE) -> list[Any]:
    data, found, sizes = _gather_records(comm, obj, timeout, codec)
    if found is None:
        return _unpickled(comm.all_gather(_array(data), counts=sizes, timeout=timeout), sizes, codec)
    return [codec.loads(each) for each in found]


def gather(comm: Any, obj: Any, root: int, timeout: float | None = None, codec: Any = PICKLE) -> list[Any] | None:
    data, found, sizes = _gather_records(comm, obj, timeout, codec)
    if found is None:
        gathered = comm.gather(_array(data), root=root, counts=sizes, timeout=timeout)
        return None if gathered is None else _unpickled(gathered, sizes, codec)
    return [codec.loads(each) for each in found] if comm.rank == root else None


def scatter(comm: Any, objs: Sequence[Any] | None, root: int, timeout: float | None = None, codec: Any = PICKLE) -> Any:
    """Return on each rank its object of `objs`, which `root` has."""
    data, error = _all_pickled(objs or [], codec)
    records = _records(data) if comm.rank == root else None
    record = comm.scatter(records, np.empty(RECORD, np.uint8), root, timeout=timeout)
    size, longest = HEADER.unpack_from(record)
    if size == FAILED:
        raise _not_pickled(comm, root, error)
    if longest <= ROOM:
        return codec.loads(record[START : START + size])
    expected = [size if rank == root else 0 for rank in range(comm.size)]
    (obj,) = _exchange(comm, data or [b""] * comm.size, [size], expected, timeout, codec)
    return obj


def all_to_all(comm: Any, objs: Sequence[Any], timeout: float | None = None, codec: Any = PICKLE) -> list[Any]:
    """Return the objects that all ranks have for this one, which are `objs[rank]` there."""
    data, error = _all_pickled(objs, codec)
    sent = _records(data)
    records = comm.all_to_all(sent, np.empty_like(sent), timeout=timeout).tobytes()
    found, sizes = _opened(records)
    if found is None:
        _check_pickled(comm, sizes, error)
        return _exchange(comm, data, sizes, sizes, timeout, codec)
    return [codec.loads(each) for each in found]


def _gather_records(comm: Any, obj: Any, timeout: float | None, codec: Any) -> tuple[Any, list[Any] | None, list[int]]:
    """Return the pickled object, and those of all ranks; if some are longer than a record, None and their sizes."""
    data, error = _pickled(obj, codec)
    opened: Any = NotImplemented if timeout is not None else comm.fast_path.all_gather_record(data)
    if opened is NotImplemented:
        opened = _opened(comm.all_gather(_array(_record(data)), timeout=timeout).tobytes())
    found, sizes = opened
    if found is None:
        _check_pickled(comm, sizes, error)
    return data, found, sizes


def _exchange(
    comm: Any, data: list[Any], sizes: list[int], expected: list[int], timeout: float | None, codec: Any
) -> list[Any]:
    """Send data[rank] to each rank; return the objects of these sizes, `expected` bytes of which each rank sends."""
    received = np.empty(sum(expected), np.uint8)
    comm.all_to_all(_array(b"".join(data)), received, [len(each) for each in data], expected, timeout=timeout)
    return _unpickled(received, sizes, codec)


def _pickled(obj: Any, codec: Any) -> tuple[Any, BaseException | None]:
    """Return the pickled object, or None and the error; the other ranks learn of it before this one raises it."""
    (data,), error = _all_pickled([obj], codec)
    return data, error


def _all_pickled(objs: Sequence[Any], codec: Any) -> tuple[list[Any], BaseException | None]:
    """Return the pickled objects; if one could not be pickled, None for each, and the error."""
    try:
        return [_checked(codec.dumps(obj)) for obj in objs], None
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: the other ranks are in the call
        return [None for _ in objs], error


def _checked(data: Any) -> Any:
    """Return what `dumps` of a program's own codec has returned, if it is bytes."""
    memoryview(data)
    return data


def _array(data: Any) -> Any:
    return np.frombuffer(data, BYTE)


def _record(data: Any, longest: int | None = None) -> Any:
    """Return the record of a pickled object. One that is too long has none of its bytes there."""
    size = FAILED if data is None else len(data)
    header = HEADER.pack(size, size if longest is None else longest)
    return (header + data if 0 <= size <= ROOM else header).ljust(RECORD, b"\0")


def _records(data: list[Any]) -> Any:
    longest = max(FAILED if each is None else len(each) for each in data)
    return _array(b"".join([_record(each, longest) for each in data]))


def _opened(records: bytes) -> tuple[list[bytes] | None, Any]:
    """Return the pickled objects in records of all ranks, and None; if some rank has a longer one, None and the sizes.

    All ranks see alike whether a second call follows. No rank unpickles before it, since that may fail on one of them.
    """
    starts = range(0, len(records), RECORD)
    headers = [HEADER.unpack_from(records, at) for at in starts]
    sizes = [size for size, _ in headers]
    if all(0 <= longest <= ROOM for _, longest in headers):
        return [records[at + START : at + START + size] for at, size in zip(starts, sizes, strict=True)], None
    return None, sizes


def _check_pickled(comm: Any, sizes: list[int], error: BaseException | None) -> None:
    """Raise the error of the first rank that could not pickle its object."""
    if FAILED in sizes:
        raise _not_pickled(comm, sizes.index(FAILED), error)


def _not_pickled(comm: Any, rank: int, error: BaseException | None) -> BaseException:
    """Return the error of a rank that could not pickle its object, or that of this one."""
    if error is None:
        return RingcommError(f"rank {rank} could not pickle its object, and raised the reason", rank=rank)
    if not isinstance(error, Exception):
        return error  # it ends the program, unless that says otherwise
    text = f"rank {comm.rank} could not pickle its object: {describe_error(error)}"
    failure = RingcommError(text, rank=comm.rank)
    failure.__cause__ = error
    return failure


def _unpickled(data: Any, sizes: list[int], codec: Any) -> list[Any]:
    ends = np.cumsum(sizes)
    return [codec.loads(data[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
