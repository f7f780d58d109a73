"""The communicator: every call is checked and shaped here, then done by the transport in one go."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike

from ringcomm import objects
from ringcomm.buffer import ADAPTERS, check_disjoint, dtype_of, find_device, fitting
from ringcomm.devices.contract import Device
from ringcomm.errors import ArgumentError, RingcommError, in_words, integer, refuse
from ringcomm.native import NULL, seconds
from ringcomm.shapes import Shapes, axes
from ringcomm.transports.contract import Transport
from ringcomm.transports.routing import RoutingTransport
from ringcomm.types import OPS, PremulSum, reduction
from ringcomm.work import Both, Unfinished, Work

__all__ = ["Communicator", "open_transports"]

Op = str | PremulSum
ANY = -1  # the peer of a recv that takes any source

open_transports: set[Transport] = set()  # of the communicators of this process


class Communicator:
    """A group of ranks that can run collectives: all of them call the same ones in the same order.

    Arrays are NumPy arrays, PyTorch tensors, CuPy arrays, or anything with the buffer protocol, DLPack in host
    memory or __cuda_array_interface__; C-contiguous, and writable where something is written (which takes DLPack
    1.0 and NumPy 2.1 to be seen). A result of the input's shape is written in place unless `out` is given; a result
    of another shape is a new array of the input's kind unless `out` is given. `out` may be the input itself or,
    where one array is a part of the other, exactly that part.

    What lies on a GPU is done in the order of the current stream, CuPy's or torch's: calls return when they are
    launched, and what goes wrong later is raised by a later call.

    `timeout` is in seconds; None takes the communicator's. With `async_op=True` a call returns a `Work` at once, whose
    `wait()` returns the result.

    Every call may raise
        ArgumentError: nothing was sent, the communicator stays usable;
        MismatchError: the ranks called different things; raised on all of them, the communicator stays usable;
        CollectiveTimeout, PeerLost, Aborted, KeyboardInterrupt: the communicator is broken; every later call on every
            rank raises the first reason.
    """

    def __init__(self, transport: Transport) -> None:
        transport = RoutingTransport(transport)
        self.rank = transport.rank
        self.size = transport.size
        self.timeout = transport.timeout
        self._transport = transport
        self._shapes = Shapes(transport.rank, transport.size)
        self._fused = transport.fused
        self._quick = transport.quick
        self._unfinished = Unfinished(transport)
        open_transports.add(transport)
        # Runs once: by close(), when the communicator is collected, or at exit. Then nothing touches the memory of the
        # unfinished works any more.
        self._close = weakref.finalize(self, _close, transport, self._unfinished)

    def __repr__(self) -> str:
        state = "" if self._close.alive else ", closed"
        return f"<ringcomm.Communicator rank {self.rank} of {self.size}, {self._transport.name}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is not None:
                with suppress(RingcommError):  # it is closed, or its parent process's: what left the block counts
                    self.abort(in_words(error))
        finally:
            self.close()

    # --- Collectives --------------------------------------------------------------------------------------------------

    def all_reduce(
        self, x: Any, op: Op = "sum", out: Any = None, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Combine x of all ranks, element by element; every rank gets the same bits."""
        if (done := self._quick.all_reduce(x, out, op, timeout, async_op)) is not NotImplemented:
            return done
        source, count, dtype = ADAPTERS[type(x)].memory(x, out is None)
        if out is None:
            out, target = x, source
        else:
            target = fitting(out, count, dtype)
        try:
            code, factor = OPS[op]
        except TypeError:
            code, factor = reduction(op)
        run = self._queue("all_reduce", out, x) if async_op else self._fused["all_reduce"]
        limit = -1.0 if timeout is None else seconds(timeout)
        return run(source, target, count, dtype, code, factor, 0, NULL, limit) or out  # run returns None, or a Work

    def reduce(
        self,
        x: Any,
        op: Op = "sum",
        root: int = 0,
        out: Any = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine x of all ranks on `root`. Returns x or `out` there, None elsewhere, where x is untouched."""
        if (done := self._quick.reduce(x, out, op, root, timeout, async_op)) is not NotImplemented:
            return done
        is_root = self._peer("root", root) == self.rank
        source, count, dtype = ADAPTERS[type(x)].memory(x, is_root and out is None)
        if not is_root:
            out, target = None, NULL
        elif out is None:
            out, target = x, source
        else:
            target = fitting(out, count, dtype)
        code, factor = reduction(op)
        run = self._queue("reduce", out, x) if async_op else self._fused["reduce"]
        return run(source, target, count, dtype, code, factor, root, NULL, seconds(timeout)) or out

    def broadcast(self, x: Any, root: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Write x of `root` into x of every rank. Returns x."""
        if (done := self._quick.broadcast(x, None, root, timeout, async_op)) is not NotImplemented:
            return done
        data, count, dtype = ADAPTERS[type(x)].memory(x, self._peer("root", root) != self.rank)
        run = self._queue("broadcast", x) if async_op else self._fused["broadcast"]
        return run(data, data, count, dtype, 0, 1.0, root, NULL, seconds(timeout)) or x

    def all_gather(
        self,
        x: Any,
        out: Any = None,
        counts: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Put x of all ranks one after the other, on every rank.

        Returns shape (size, *x.shape); with `counts`, the rows of axis 0 that each rank has, they are concatenated
        along axis 0.
        """
        if (done := self._quick.all_gather(x, out, counts, timeout, async_op)) is not NotImplemented:
            return done
        adapter = ADAPTERS[type(x)]
        source, count, dtype = adapter.memory(x, False)
        shape, blocks = self._shapes.joined(adapter.shape(x), counts)
        if out is None:
            out = adapter.empty(x, shape)
        target = fitting(out, prod(shape), dtype)
        run = self._queue("all_gather", out, x) if async_op else self._fused["all_gather"]
        return run(source, target, count, dtype, 0, 1.0, 0, blocks, seconds(timeout)) or out

    def gather(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Put x of all ranks one after the other, on `root`. Returns what all_gather does there, None elsewhere."""
        if (done := self._quick.gather(x, out, root, counts, timeout, async_op)) is not NotImplemented:
            return done
        adapter = ADAPTERS[type(x)]
        source, count, dtype = adapter.memory(x, False)
        shape, blocks = self._shapes.joined(adapter.shape(x), counts)
        if self._peer("root", root) != self.rank:
            out, target = None, NULL
        else:
            if out is None:
                out = adapter.empty(x, shape)
            target = fitting(out, prod(shape), dtype)
        run = self._queue("gather", out, x) if async_op else self._fused["gather"]
        return run(source, target, count, dtype, 0, 1.0, root, blocks, seconds(timeout)) or out

    def scatter(
        self,
        x: Any = None,
        out: Any = None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Divide axis 0 of x of `root` among the ranks: equal shares, or `counts` rows.

        Elsewhere x is None and `out` says how much is expected; its axis 0 has this rank's rows. Returns the share,
        shape (rows of this rank, *x.shape[1:]).
        """
        if (done := self._quick.scatter(x, out, root, counts, timeout, async_op)) is not NotImplemented:
            return done
        if self._peer("root", root) == self.rank:
            adapter = ADAPTERS[type(x)]
            source, _, dtype = adapter.memory(x, False)
            shape, count, blocks = self._shapes.share(adapter.shape(x), counts)
            if out is None:
                out = adapter.empty(x, shape)
            target = fitting(out, count, dtype)
        else:
            if out is None:
                what, expected = f"out of scatter on rank {self.rank}", f"an array, since only root {root} has x"
                raise refuse(what, expected, None, rank=self.rank, collective="scatter")
            adapter = ADAPTERS[type(out)]
            source, (target, count, dtype) = NULL, adapter.memory(out, True)
            _, blocks = self._shapes.joined(adapter.shape(out), counts)
        run = self._queue("scatter", out, x) if async_op else self._fused["scatter"]
        return run(source, target, count, dtype, 0, 1.0, root, blocks, seconds(timeout)) or out

    def reduce_scatter(
        self,
        x: Any,
        op: Op = "sum",
        out: Any = None,
        counts: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine x of all ranks and divide axis 0 of the result among them: equal shares, or `counts` rows.

        Returns this rank's share, shape (rows of this rank, *x.shape[1:]).
        """
        if (done := self._quick.reduce_scatter(x, out, op, counts, timeout, async_op)) is not NotImplemented:
            return done
        adapter = ADAPTERS[type(x)]
        source, _, dtype = adapter.memory(x, False)
        shape, count, blocks = self._shapes.share(adapter.shape(x), counts)
        if out is None:
            out = adapter.empty(x, shape)
        target = fitting(out, count, dtype)
        code, factor = reduction(op)
        run = self._queue("reduce_scatter", out, x) if async_op else self._fused["reduce_scatter"]
        return run(source, target, count, dtype, code, factor, 0, blocks, seconds(timeout)) or out

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Divide axis 0 of x among the ranks: block j goes to rank j, block i of the result comes from rank i.

        Equal blocks are exchanged in place unless `out` is given. With `send_counts` and `recv_counts`, the rows for
        and from each rank, the result is a new array unless `out` is given.
        """
        if (done := self._quick.all_to_all(x, out, send_counts, recv_counts, timeout, async_op)) is not NotImplemented:
            return done
        adapter = ADAPTERS[type(x)]
        shape = adapter.shape(x)
        if send_counts is None and recv_counts is None:
            source, total, dtype = adapter.memory(x, out is None)
            count, blocks = self._shapes.share(shape, None)[1:]
            if out is None:
                out = x
        elif send_counts is None or recv_counts is None:
            message = "all_to_all needs both send_counts and recv_counts, or neither"
            raise ArgumentError(message, rank=self.rank, collective="all_to_all")
        else:
            source, _, dtype = adapter.memory(x, False)
            shape, blocks = self._shapes.exchanged(shape, send_counts, recv_counts)
            count, total = 0, prod(shape)
            if out is None:
                out = adapter.empty(x, shape)
        target = fitting(out, total, dtype)
        run = self._queue("all_to_all", out, x) if async_op else self._fused["all_to_all"]
        return run(source, target, count, dtype, 0, 1.0, 0, blocks, seconds(timeout)) or out

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return when all ranks have come here."""
        plain = not self._transport.on_gpus  # else it comes after what was launched
        if plain and (done := self._quick.barrier(timeout, async_op)) is not NotImplemented:
            return done
        run = self._queue("barrier", None) if async_op else self._fused["barrier"]
        return run(NULL, NULL, 0, 0, 0, 1.0, 0, NULL, seconds(timeout))

    # --- Point to point -----------------------------------------------------------------------------------------------

    def send(self, x: Any, peer: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Send x to `peer`; a large one may wait until it is received. Ordered per peer and tag."""
        if (done := self._quick.send(x, peer, tag, timeout, async_op)) is not NotImplemented:
            return done
        call = (*ADAPTERS[type(x)].memory(x, False), self._peer("peer", peer), *_options(tag, timeout))
        return self._isend(x, call) if async_op else self._transport.send(*call)

    def recv(
        self, x: Any, peer: int | None = None, tag: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Receive into x from `peer`, or from any rank. Returns the rank that sent."""
        if (done := self._quick.recv(x, peer, tag, timeout, async_op)) is not NotImplemented:
            return done
        call = (*ADAPTERS[type(x)].memory(x, True), self._source("peer", peer), *_options(tag, timeout))
        return self._irecv(x, call) if async_op else self._transport.recv(*call)

    def sendrecv(
        self,
        x: Any,
        dest: int,
        out: Any,
        source: int | None,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send x to `dest` and receive `out` from `source` at once. Returns the rank that sent."""
        if (done := self._quick.sendrecv(x, dest, out, source, tag, timeout, async_op)) is not NotImplemented:
            return done
        sent = (*ADAPTERS[type(x)].memory(x, False), self._peer("dest", dest))
        received = (*ADAPTERS[type(out)].memory(out, True), self._source("source", source))
        options = _options(tag, timeout)
        if async_op:
            check_disjoint(sent[:3], received[:3])  # two native calls: neither sees the other's memory
            works = self._isend(x, (*sent, *options)), self._irecv(out, (*received, *options))
            return Work(Both, works, lambda source: source, None, self._unfinished)
        return self._transport.sendrecv(*sent, *received, *options)

    # --- Python objects -----------------------------------------------------------------------------------------------

    def broadcast_object(self, obj: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """Return the object of `root` on every rank, pickled on the way.

        There are two rounds, for the size and for the pickle, and `timeout` holds for each. Where the object cannot be
        pickled, `root` raises what pickle raised, the others RingcommError; the communicator stays usable.
        """
        return objects.broadcast(self, obj, self._peer("root", root), timeout)

    def all_gather_object(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """Return the objects of all ranks in rank order, pickled on the way.

        There are two rounds, and `timeout` holds for each. Where an object cannot be pickled, its rank raises what
        pickle raised, the others RingcommError; the communicator stays usable.
        """
        return objects.all_gather(self, obj, timeout)

    def gather_object(self, obj: Any, root: int = 0, *, timeout: float | None = None) -> list[Any] | None:
        """Return the objects of all ranks in rank order on `root`, None elsewhere: like all_gather_object."""
        return objects.gather(self, obj, self._peer("root", root), timeout)

    # --- Groups, memory, ends -----------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """Make a communicator of the ranks with the same color, ordered by key, then rank. Collective.

        Returns None where color is None; such a rank takes part all the same. The new one inherits the timeout and
        stays usable when this one is closed. Raises MemoryShortage on every rank if one has not enough.
        """
        transport = self._transport.split(None if color is None else integer("color", color), integer("key", key))
        return None if transport is None else Communicator(transport)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike, device: str = "host") -> Any:
        """Make a symmetric buffer: a zero-filled array that the peers read and write directly. Collective.

        All ranks pass the same arguments (MismatchError). Any contiguous view of it counts as symmetric. The memory
        lives as long as any view of it. Raises MemoryShortage on every rank if one has not enough.
        """
        kind, _ = dtype_of(dtype)
        lengths = axes(shape, kind.itemsize)
        words, size = f"empty({lengths}, {kind.name}, {device})", prod(lengths) * kind.itemsize
        if device == "host":
            return np.ndarray(lengths, kind, self._transport.allocate(words, size))
        place: Device = find_device(device)
        return place.array(self._transport.allocate_on(place, words, size), lengths, kind)

    def abort(self, reason: str) -> None:
        """Break the communicator: every call on every rank, waiting or later, raises Aborted with this reason."""
        if not isinstance(reason, str):
            raise refuse("reason", "a string", repr(reason))
        self._transport.abort(reason)

    def close(self) -> None:
        """End this rank's part; calling it twice is fine. Peers that still need this rank get PeerLost.

        From a signal handler that has interrupted a call of this communicator it only ends that call; call it again to
        give back the memory of works that nobody has waited for.
        """
        if self._transport.close():
            self._close()

    def check(self) -> None:
        """Raise the first failure of the communicator, if there was one."""
        self._transport.check()

    def report(self, calls: int = 3) -> str:
        """Print the last calls of every rank, 1023 at most, what each does or waits for, and return the text."""
        text = self._transport.report(integer("calls", calls, 1))
        print(text, end="")
        return text

    # --- Helpers ------------------------------------------------------------------------------------------------------

    def _queue(self, collective: str, result: Any, *arrays: Any) -> Callable[..., Work]:
        def start(*call: Any) -> Work:
            return Work(self._transport.start, (collective, *call), lambda _: result, arrays, self._unfinished)

        return start

    def _isend(self, x: Any, call: tuple[Any, ...]) -> Work:
        return Work(self._transport.isend, call, lambda _: None, x, self._unfinished)

    def _irecv(self, x: Any, call: tuple[Any, ...]) -> Work:
        return Work(self._transport.irecv, call, lambda source: source, x, self._unfinished)

    def _peer(self, what: str, rank: int) -> int:
        if type(rank) is not int:
            rank = integer(what, rank)
        if not 0 <= rank < self.size:
            raise refuse(what, f"a rank from 0 to {self.size - 1}", rank, rank=self.rank)
        return rank

    def _source(self, what: str, rank: int | None) -> int:
        return ANY if rank is None else self._peer(what, rank)


def _close(transport: Transport, unfinished: Unfinished) -> None:
    transport.close()
    unfinished.clear()
    open_transports.discard(transport)


def _options(tag: int, timeout: float | None) -> tuple[int, float]:
    """Return tag and timeout as the transport takes them."""
    if tag or type(tag) is not int:
        tag = integer("tag", tag)
    return tag, -1.0 if timeout is None else seconds(timeout)
