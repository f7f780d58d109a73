"""The contract of a transport as a test, `check_transport`. It takes any transport, and needs no test framework."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from queue import SimpleQueue
from typing import Any

import numpy as np

from ringcomm.communicator import Communicator
from ringcomm.errors import Aborted, ArgumentError, CollectiveTimeout, MismatchError, PeerLost, RingcommError
from ringcomm.testing.threads import run_threads
from ringcomm.transports.contract import Transport
from ringcomm.types import premul_sum
from ringcomm.work import Work

__all__ = ["CHECKS", "check_rank", "check_transport"]

Check = Callable[[Communicator], None]

CHECKS: list[Check] = []
LENGTHS = (0, 1, 7, 1000, 300_001)  # nothing, inline, odd, one chunk, several chunks


def check_transport(make_world: Callable[[int], Sequence[Transport]], sizes: Sequence[int] = (1, 2, 3, 4)) -> None:
    """Run every check of this file in worlds of these sizes; raise if a transport breaks the contract.

    `make_world(size)` returns the connected transports of `size` ranks in rank order, each usable from its own thread,
    with a timeout of some seconds. `connect_threads` makes them from the `connect` of a transport.
    """
    for size in sizes:
        for check in CHECKS:
            try:
                run_threads(check, [Communicator(transport) for transport in make_world(size)])
            except BaseException as error:
                error.add_note(f"in the check {check.__name__}, {size} ranks")
                raise


def check_rank(connect: Callable[[], Communicator], checks: Sequence[Check] = CHECKS) -> None:
    """Run every check of this file as one rank of a world; raise if the transport breaks the contract.

    For ranks that are separate programs: all of them call this. `connect()` returns a communicator of all ranks with a
    timeout of some seconds, such as `lambda: ringcomm.init(timeout=10)`; every check uses a new one.
    """
    for check in checks:
        with connect() as comm:
            try:
                check(comm)
            except BaseException as error:
                error.add_note(f"in the check {check.__name__}, rank {comm.rank} of {comm.size}")
                raise


def _check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def _input(rank: int, length: int) -> Any:
    """Return the array of a rank: small integers, so that float32 is exact and the sum over ranks has a closed form."""
    return (np.arange(length) % 5 + rank + 1).astype(np.float32)


def _block_lengths(comm: Communicator) -> tuple[int, ...]:
    return (0, 1, 7, 300_001 // comm.size)


def _sum(size: int, length: int) -> Any:
    return (size * (np.arange(length) % 5) + size * (size + 1) // 2).astype(np.float32)


def _raises(kind: type[RingcommError], call: Callable[[], Any]) -> RingcommError:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


_equal = partial(np.testing.assert_array_equal, strict=True)


# --- Values ---------------------------------------------------------------------------------------------------------


@_check
def all_reduce_combines_all_ranks_in_place_and_out_of_place(comm: Communicator) -> None:
    for length in LENGTHS:
        x, out = _input(comm.rank, length), np.empty(length, np.float32)
        assert comm.all_reduce(x, out=out) is out
        _equal(x, _input(comm.rank, length))
        _equal(out, _sum(comm.size, length))
        assert comm.all_reduce(x) is x
        _equal(x, out)


@_check
def every_operation_computes_its_function(comm: Communicator) -> None:
    x = np.array([comm.rank + 1, 2], np.float64)
    last = comm.size
    for op, first, second in (
        ("sum", last * (last + 1) / 2, 2 * last),
        ("prod", prod(float(rank + 1) for rank in range(last)), 2**last),
        ("min", 1, 2),
        ("max", last, 2),
        ("avg", (last + 1) / 2, 2),
        (premul_sum(0.5), last * (last + 1) / 4, last),
    ):
        _equal(comm.all_reduce(x, op, np.empty(2)), np.array([first, second], float))


@_check
def reduce_writes_on_the_root_only(comm: Communicator) -> None:
    for length in LENGTHS:
        for root in (0, comm.size - 1):
            x = _input(comm.rank, length)
            result = comm.reduce(x, root=root)
            assert (result is x) if comm.rank == root else result is None
            _equal(x, _sum(comm.size, length) if comm.rank == root else _input(comm.rank, length))


@_check
def broadcast_copies_the_array_of_the_root(comm: Communicator) -> None:
    for length in LENGTHS:
        for root in (0, comm.size - 1):
            x = _input(comm.rank, length)
            assert comm.broadcast(x, root) is x
            _equal(x, _input(root, length))


@_check
def all_gather_and_gather_stack_the_arrays_in_rank_order(comm: Communicator) -> None:
    for length in _block_lengths(comm):
        expected = np.stack([_input(rank, length) for rank in range(comm.size)])
        _equal(comm.all_gather(_input(comm.rank, length)), expected)
        whole = np.zeros_like(expected)
        whole[comm.rank] = _input(comm.rank, length)
        _equal(comm.all_gather(whole[comm.rank], out=whole), expected)
        for root in (0, comm.size - 1):
            gathered = comm.gather(_input(comm.rank, length), root=root)
            if comm.rank == root:
                _equal(gathered, expected)
            else:
                assert gathered is None


@_check
def counts_divide_axis_0_unevenly(comm: Communicator) -> None:
    for factor in (1, 20_001 // comm.size):
        counts = [factor * rank for rank in range(comm.size)]
        whole = _input(0, 3 * sum(counts)).reshape(-1, 3)
        begin = sum(counts[: comm.rank])
        mine = whole[begin : begin + counts[comm.rank]]
        _equal(comm.all_gather(mine, counts=counts), whole)
        gathered = comm.gather(mine, root=0, counts=counts)
        if comm.rank == 0:
            _equal(gathered, whole)
            _equal(comm.scatter(whole, root=0, counts=counts), mine)
        else:
            _equal(comm.scatter(out=np.empty_like(mine), root=0, counts=counts), mine)
        _equal(comm.reduce_scatter(whole, "max", counts=counts), mine)


@_check
def scatter_divides_the_array_of_the_root(comm: Communicator) -> None:
    for length in _block_lengths(comm):
        for root in (0, comm.size - 1):
            out = np.empty(length, np.float32)
            x = _input(root, comm.size * length) if comm.rank == root else None
            assert comm.scatter(x, out, root) is out
            _equal(out, _input(root, comm.size * length)[comm.rank * length :][:length])


@_check
def reduce_scatter_leaves_each_rank_its_share(comm: Communicator) -> None:
    for length in _block_lengths(comm):
        x = _input(comm.rank, comm.size * length)
        share = slice(comm.rank * length, (comm.rank + 1) * length)
        expected = _sum(comm.size, comm.size * length)[share]
        _equal(comm.reduce_scatter(x), expected)
        _equal(comm.reduce_scatter(x, out=x[share]), expected)


@_check
def all_to_all_transposes_blocks(comm: Communicator) -> None:
    for length in _block_lengths(comm):
        x = np.repeat(np.arange(comm.size) * 100 + comm.rank, length)
        expected = np.repeat(np.arange(comm.size) + comm.rank * 100, length)
        _equal(comm.all_to_all(x, out=np.empty_like(x)), expected)
        assert comm.all_to_all(x) is x
        _equal(x, expected)


@_check
def all_to_all_takes_counts(comm: Communicator) -> None:
    send = [comm.rank + peer for peer in range(comm.size)]  # symmetric: each pair sends as much as it receives
    x = np.repeat(np.arange(comm.size, dtype=np.int64) * 100 + comm.rank, send)
    expected = np.repeat(np.arange(comm.size, dtype=np.int64) + comm.rank * 100, send)
    _equal(comm.all_to_all(x, send_counts=send, recv_counts=send), expected)
    counts: Any = np.array(send)
    _equal(comm.all_to_all(x, send_counts=counts, recv_counts=counts), expected)


# --- Point to point ---------------------------------------------------------------------------------------------------


@_check
def messages_keep_their_order_per_peer_and_tag(comm: Communicator) -> None:
    works = [
        comm.send(np.array([peer, tag, number]), peer, tag, async_op=True)
        for peer in range(comm.size)
        for number in range(3)
        for tag in (5, -5)
    ]
    for peer in reversed(range(comm.size)):
        for tag in (-5, 5):
            for number in range(3):
                x = np.empty(3, np.int64)
                assert comm.recv(x, peer, tag) == peer
                _equal(x, np.array([comm.rank, tag, number]))
    for work in works:
        work.wait()


@_check
def a_receive_from_any_rank_returns_the_sender(comm: Communicator) -> None:
    works = [comm.send(np.array([comm.rank]), peer, async_op=True) for peer in range(comm.size)]
    x = np.empty(1, np.int64)
    sources = []
    for _ in range(comm.size):
        sources.append(comm.recv(x))
        assert x[0] == sources[-1]
    assert sorted(sources) == list(range(comm.size))
    for work in works:
        assert work.wait() is None


@_check
def large_messages_cross(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for length in LENGTHS:
        out = np.empty(length, np.float32)
        work = comm.send(_input(comm.rank, length), right, async_op=True)
        assert comm.recv(out, left, async_op=True).wait() == left
        work.wait()
        _equal(out, _input(left, length))
        out.fill(0)
        assert comm.sendrecv(_input(comm.rank, length), right, out, left) == left
        _equal(out, _input(left, length))


# --- Works, groups, memory --------------------------------------------------------------------------------------------


@_check
def queued_calls_run_in_their_order(comm: Communicator) -> None:
    x = np.ones(1000, np.int64)
    works = [comm.all_reduce(x, async_op=True) for _ in range(5)]
    abandoned = comm.all_gather(_input(comm.rank, 10), async_op=True)
    del abandoned
    comm.barrier()
    assert all(work.done() for work in works)
    assert all(work.wait() is x and work.result is x for work in works)
    _equal(x, np.full(1000, comm.size**5))


@_check
def callbacks_run_when_a_call_is_done(comm: Communicator) -> None:
    done: SimpleQueue[Work] = SimpleQueue()
    works = [comm.all_reduce(np.ones(1000), async_op=True), comm.barrier(async_op=True)]
    for work in works:
        work.add_done_callback(done.put)
        work.add_done_callback(done.put)  # twice: every callback is called
    assert Counter(done.get(timeout=comm.timeout) for _ in works * 2) == Counter(works * 2)
    assert all(work.done() for work in works)


@_check
def a_group_has_its_own_ranks_and_outlives_its_parent(comm: Communicator) -> None:
    assert comm.split(None) is None
    group = comm.split(comm.rank % 2, key=-comm.rank)
    assert group is not None
    members = sorted(range(comm.rank % 2, comm.size, 2), reverse=True)
    assert (group.rank, group.size) == (members.index(comm.rank), len(members))
    comm.close()
    with group:
        _equal(group.all_gather(np.array(comm.rank)), np.array(members))
        assert group.all_gather_object({"rank": comm.rank}) == [{"rank": rank} for rank in members]


@_check
def a_symmetric_buffer_is_zero_and_works_like_any_array(comm: Communicator) -> None:
    for length in LENGTHS:
        x = comm.empty((length,), np.float32)
        _equal(x, np.zeros(length, np.float32))
        x[:] = _input(comm.rank, length)
        _equal(comm.all_reduce(x), _sum(comm.size, length))
    comm.close()
    _equal(x, _sum(comm.size, length))


# --- When things go wrong ---------------------------------------------------------------------------------------------


@_check
def a_refused_call_leaves_the_communicator_usable(comm: Communicator) -> None:
    x = np.ones(4, np.complex64)
    _raises(ArgumentError, lambda: comm.all_reduce(x, "max"))
    _raises(ArgumentError, lambda: comm.broadcast(x, root=comm.size))
    _raises(ArgumentError, lambda: comm.all_reduce(x[:3], out=x[1:]))
    _equal(comm.all_reduce(x), np.full(4, comm.size, np.complex64))


@_check
def a_mismatch_is_named_on_every_rank(comm: Communicator) -> None:
    if comm.size == 1:
        return
    odd = comm.rank == comm.size - 1
    x = np.ones(5 if odd else 4)
    error = _raises(MismatchError, lambda: comm.all_reduce(x))
    assert "5" in str(error)
    assert "4" in str(error)
    _equal(x, np.ones_like(x))
    error = _raises(MismatchError, comm.barrier if odd else lambda: comm.all_reduce(x))
    assert "barrier" in str(error)
    assert "all_reduce" in str(error)
    _raises(MismatchError, lambda: comm.empty(comm.rank, "int8"))
    _equal(comm.all_reduce(np.array(1)), np.array(comm.size))


@_check
def a_late_rank_is_a_timeout_for_all(comm: Communicator) -> None:
    if comm.size == 1:
        return
    if comm.rank > 0:
        _raises(CollectiveTimeout, lambda: comm.barrier(timeout=0.05))
    else:
        _wait_for_the_end(comm)
    _raises(CollectiveTimeout, comm.barrier)


@_check
def abort_reaches_every_rank_with_its_reason(comm: Communicator) -> None:
    if comm.rank == comm.size - 1:
        comm.abort("the data is wrong")
    x = np.zeros(1)
    call = comm.barrier if comm.rank % 2 else lambda: comm.recv(x)
    reason = f"rank {comm.size - 1} aborted: the data is wrong"
    assert reason in str(_raises(Aborted, call))
    assert reason in str(_raises(Aborted, comm.barrier))


@_check
def a_rank_that_needs_a_closed_one_raises_peer_lost(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.close()
        comm.close()
        _raises(ArgumentError, comm.barrier)
    else:
        error = _raises(PeerLost, comm.barrier)
        assert error.rank == 0


def _wait_for_the_end(comm: Communicator) -> None:
    with suppress(RingcommError):
        while True:
            comm.check()
