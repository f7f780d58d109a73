"""Collectives of Python objects, on top of those of arrays.

An object travels pickled in a record of fixed size; only if some object is longer a second call moves the bytes of all.
In a gather a longer object follows as a message, which no receive of the program matches.
The large arrays in an object that is broadcast are not pickled: each is broadcast by itself, into its final place.
The fast path makes the first call as a whole: it pickles the objects into records, and unpickles those that come.

Records that go from the root or to it do not wait for all ranks, whose calls may differ. So before a further part a
rank confirms that all have made the one before: else it would go on alone, and stay a call ahead of the others. For the
same reason the mismatch of an earlier call is raised only after the last part.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringcomm.errors import RingcommError, describe_error
from ringcomm.native import LARGE, RECORD, ffi, has_large_array, lib, open_objects, pack_objects, seconds
from ringcomm.transports.calls import CollectiveCall
from ringcomm.types import DTYPES

__all__ = ["Codec", "all_gather", "all_to_all", "broadcast", "gather", "scatter"]

BYTE = np.dtype(np.uint8)
FAILED = -1  # the size of an object that could not be pickled


class Codec(NamedTuple):
    """How objects become bytes. `dumps` takes the protocol, unless that is None."""

    dumps: Callable[..., Any]
    protocol: int | None
    loads: Callable[..., Any]

    @property
    def leaves_buffers_out(self) -> bool:
        """Whether `dumps` and `loads` take large buffers beside the pickle."""
        return self.dumps is pickle.dumps and self.loads is pickle.loads and (self.protocol or 0) >= 5


PICKLE = Codec(pickle.dumps, 5, pickle.loads)


class Unfinished(NamedTuple):
    """What the first call leaves if some object is longer than a record, or could not be pickled."""

    data: list[Any]  # the pickled objects of this rank; on the root of a gather those of all, None for the longer ones
    error: BaseException | None  # of this rank's pickling
    sizes: list[int]  # of the objects for this rank; on a rank of a gather that is not the root, of its own


# What the fast path and `_exchange_records` return: the result, and None; or None, and the fields of an Unfinished; and
# whether a mismatch of an earlier call is to be raised.
Outcome = tuple[Any, tuple[list[Any], BaseException | None, list[int]] | None, bool]

# `comm` is a Communicator; its methods document these functions.


def broadcast(comm: Any, obj: Any, root: int, timeout: float | None = None, codec: Codec = PICKLE) -> Any:
    sent, is_root = obj, comm.rank == root
    outcome: Outcome = comm.fast_path.broadcast_object(obj, root, codec, timeout)
    if outcome is NotImplemented:
        if is_root and codec.leaves_buffers_out and has_large_array(obj):
            sent = _Apart(obj)
        outcome = _exchange_records(comm, "broadcast", [sent], root, timeout, codec)
    found, rest, late = outcome
    if rest is not None:
        data, (size,) = _check_pickled(comm, rest, root)
        content = _array(data[0]) if is_root else np.empty(size, np.uint8)
        late = _broadcast_part(comm, content, root, timeout)
        found = sent if is_root else codec.loads(content)
    if isinstance(found, (_Apart, _Head)):
        for each in found.buffers:
            late = _broadcast_part(comm, each, root, timeout)
        found = found.whole()
    _raise_late(comm, late)
    return found


def all_gather(comm: Any, obj: Any, timeout: float | None = None, codec: Codec = PICKLE) -> list[Any]:
    found: list[Any]
    outcome: Outcome = comm.fast_path.all_gather_object(obj, codec, timeout)
    if outcome is NotImplemented:
        outcome = _exchange_records(comm, "all_gather", [obj], 0, timeout, codec)
    found, rest, late = outcome
    if rest is None:
        _raise_late(comm, late)
        return found
    data, sizes = _check_pickled(comm, rest)
    return _unpickled(comm.all_gather(_array(data[0]), counts=sizes, timeout=timeout), sizes, codec)


def gather(comm: Any, obj: Any, root: int, timeout: float | None = None, codec: Codec = PICKLE) -> list[Any] | None:
    found: list[Any] | None
    outcome: Outcome = comm.fast_path.gather_object(obj, root, codec, timeout)
    if outcome is NotImplemented:
        outcome = _exchange_records(comm, "gather", [obj], root, timeout, codec)
    found, rest, late = outcome
    if rest is None:
        _raise_late(comm, late)
        return found
    if comm.rank != root:
        (pickled,), _ = _check_pickled(comm, rest, comm.rank)
        comm._transport.confirm(seconds(timeout))
        comm.send(_array(pickled), root, lib.RC_OBJECT_TAG, timeout=timeout)
        comm._transport.check_calls()
        return None
    data, _, sizes = Unfinished(*rest)
    for rank, size in enumerate(sizes):
        if data[rank] is None and size != FAILED:
            data[rank] = np.empty(size, np.uint8)
            comm.recv(data[rank], rank, lib.RC_OBJECT_TAG, timeout=timeout)
    _check_pickled(comm, rest)
    comm._transport.check_calls()
    return [codec.loads(each) for each in data]


def scatter(
    comm: Any, objs: Sequence[Any] | None, root: int, timeout: float | None = None, codec: Codec = PICKLE
) -> Any:
    """Return on each rank its object of `objs`, which `root` has."""
    outcome: Outcome = comm.fast_path.scatter_object(objs, root, codec, timeout)
    if outcome is NotImplemented:
        outcome = _exchange_records(comm, "scatter", list(objs or []), root, timeout, codec)
    found, rest, late = outcome
    if rest is None:
        _raise_late(comm, late)
        return found
    data, sizes = _check_pickled(comm, rest, root)
    comm._transport.confirm(seconds(timeout))
    expected = [sizes[0] if rank == root else 0 for rank in range(comm.size)]
    (obj,) = _exchange(comm, data or [b""] * comm.size, sizes, expected, timeout, codec)
    return obj


def all_to_all(comm: Any, objs: Sequence[Any], timeout: float | None = None, codec: Codec = PICKLE) -> list[Any]:
    """Return the objects that all ranks have for this one, which are `objs[rank]` there."""
    found: list[Any]
    outcome: Outcome = comm.fast_path.all_to_all_object(objs, codec, timeout)
    if outcome is NotImplemented:
        outcome = _exchange_records(comm, "all_to_all", list(objs), 0, timeout, codec)
    found, rest, late = outcome
    if rest is None:
        _raise_late(comm, late)
        return found
    data, sizes = _check_pickled(comm, rest)
    return _exchange(comm, data, sizes, sizes, timeout, codec)


class _Apart:
    """An object of this rank that is pickled as its _Head."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj
        self.buffers: list[Any] = []  # that are left out of the pickle

    def __reduce__(self) -> Any:
        self.buffers.clear()
        pickled = pickle.dumps(self._obj, 5, buffer_callback=self._keeps)
        return _Head, (pickled, [len(each) for each in self.buffers])

    def _keeps(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether a buffer stays in the pickle."""
        data = buffer.raw()
        if data.nbytes < LARGE:
            return True
        self.buffers.append(_array(data))
        return False

    def whole(self) -> Any:
        return self._obj


class _Head:
    """A pickled object of another rank, without its large buffers, of these sizes."""

    def __init__(self, pickled: bytes, sizes: list[int]) -> None:
        self._pickled = pickled
        self.buffers = [np.empty(size, np.uint8) for size in sizes]

    def whole(self) -> Any:
        """Return the object, once its buffers have come: its arrays are there."""
        return pickle.loads(self._pickled, buffers=self.buffers)


def _broadcast_part(comm: Any, data: Any, root: int, timeout: float | None) -> bool:
    """Go on with a broadcast; return whether a mismatch of an earlier call is to be raised."""
    comm._transport.confirm(seconds(timeout))
    memory, late = ffi.from_buffer(data), ffi.new("int32_t *")
    call = CollectiveCall(memory, memory, len(data), DTYPES["uint8"], root=root, deferred_mismatch=late)
    comm._fused["broadcast"](call, seconds(timeout))
    return bool(late[0])


def _raise_late(comm: Any, late: bool) -> None:
    """Raise the mismatch of an earlier call, after the last part of this one."""
    if late:
        comm._transport.check_calls()


def _exchange_records(
    comm: Any, collective: str, objs: list[Any], root: int, timeout: float | None, codec: Codec
) -> Outcome:
    """Make the first call where the fast path does not."""
    is_root, to_all = comm.rank == root, collective in ("broadcast", "scatter")  # one object comes to each rank
    records, data, error = pack_objects(objs if is_root or not to_all else [], codec)
    only_gives = is_root if collective == "broadcast" else collective == "gather" and not is_root
    received = bytearray(records if only_gives else RECORD if to_all else RECORD * comm.size)
    source, target = ffi.from_buffer(received if collective == "broadcast" else records), ffi.from_buffer(received)
    late = ffi.new("int32_t *")
    call = CollectiveCall(source, target, RECORD, DTYPES["uint8"], root=root, deferred_mismatch=late)
    comm._fused[collective](call, seconds(timeout))
    found, sizes = open_objects(bytes(received), None if only_gives else codec)
    if sizes is not None:
        if collective == "gather" and is_root:
            data = [*found[:root], *data, *found[root + 1 :]]
        return None, Unfinished(data, error, sizes), bool(late[0])
    result = objs[0] if collective == "broadcast" and is_root else found[0] if to_all and found else found
    return result, None, bool(late[0])


def _exchange(
    comm: Any, data: list[Any], sizes: list[int], expected: list[int], timeout: float | None, codec: Codec
) -> list[Any]:
    """Send data[rank] to each rank; return the objects of these sizes, `expected` bytes of which each rank sends."""
    received = np.empty(sum(expected), np.uint8)
    comm.all_to_all(_array(b"".join(data)), received, [len(each) for each in data], expected, timeout=timeout)
    return _unpickled(received, sizes, codec)


def _check_pickled(comm: Any, rest: Any, root: int | None = None) -> tuple[list[Any], list[int]]:
    """Return the pickled objects and the sizes; raise the error of the first rank that could not pickle its object."""
    data, error, sizes = Unfinished(*rest)
    if FAILED in sizes:
        raise _not_pickled(comm, sizes.index(FAILED) if root is None else root, error)
    return data, sizes


def _array(data: Any) -> Any:
    return np.frombuffer(data, BYTE)


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


def _unpickled(data: Any, sizes: list[int], codec: Codec) -> list[Any]:
    ends = np.cumsum(sizes)
    return [codec.loads(data[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
