"""Ranks whose calls differ: every rank raises an error that names all calls, and stays usable."""

from contextlib import suppress
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest

import harness
import ringcomm
from harness.failures import check_usable, lines_of, mismatch_of, raised, until
from ringcomm import MismatchError, premul_sum
from ringcomm.bootstrap.start_errors import format_ranks

SMALL, LARGE = 3, 300_001  # elements: inline in the start record, and several chunks


class Case(NamedTuple):
    """The calls of most ranks and of the odd one, on the rows of an array, with their descriptions (see describe)."""

    usual: Any
    other: Any
    usual_words: str
    other_words: str


ALL_REDUCE = "all_reduce(float32 x {n}, sum)"
CASES = {
    "collective": Case(
        lambda comm, x, **how: comm.all_reduce(x[0], **how),
        lambda comm, x, **how: comm.broadcast(x[0], root=1, **how),
        ALL_REDUCE,
        "broadcast(float32 x {n}, root 1)",
    ),
    "barrier": Case(
        lambda comm, x, **how: comm.barrier(**how),
        lambda comm, x, **how: comm.all_reduce(x[0], "max", out=x[1], **how),
        "barrier()",
        "all_reduce(float32 x {n}, max)",
    ),
    "gather": Case(
        lambda comm, x, **how: comm.all_gather(x[0], out=x[1 : 1 + comm.size], **how),
        lambda comm, x, **how: comm.gather(x[0], out=x[1 : 1 + comm.size], root=0, **how),
        "all_gather(float32 x {n} per rank)",
        "gather(float32 x {n} per rank, root 0)",
    ),
    "blocks": Case(
        lambda comm, x, **how: comm.reduce_scatter(x[: comm.size], out=x[-1], **how),
        lambda comm, x, **how: comm.all_to_all(x[: comm.size], out=x[comm.size : 2 * comm.size], **how),
        "reduce_scatter(float32 x {n} per rank, sum)",
        "all_to_all(float32 x {n} per rank)",
    ),
    "count": Case(
        lambda comm, x, **how: comm.all_reduce(x[0], **how),
        lambda comm, x, **how: comm.all_reduce(x[0, :-1], **how),
        ALL_REDUCE,
        "all_reduce(float32 x {less}, sum)",
    ),
    "dtype": Case(
        lambda comm, x, **how: comm.all_reduce(x[0], **how),
        lambda comm, x, **how: comm.all_reduce(x[0].view(np.int32), **how),
        ALL_REDUCE,
        "all_reduce(int32 x {n}, sum)",
    ),
    "op": Case(
        lambda comm, x, **how: comm.all_reduce(x[0], **how),
        lambda comm, x, **how: comm.all_reduce(x[0], "prod", **how),
        ALL_REDUCE,
        "all_reduce(float32 x {n}, prod)",
    ),
    "factor": Case(
        lambda comm, x, **how: comm.all_reduce(x[0], premul_sum(0.5), **how),
        lambda comm, x, **how: comm.all_reduce(x[0], premul_sum(0.25), **how),
        "all_reduce(float32 x {n}, premul_sum(0.5))",
        "all_reduce(float32 x {n}, premul_sum(0.25))",
    ),
    "root": Case(
        lambda comm, x, **how: comm.broadcast(x[0], root=0, **how),
        lambda comm, x, **how: comm.broadcast(x[0], root=1, **how),
        "broadcast(float32 x {n}, root 0)",
        "broadcast(float32 x {n}, root 1)",
    ),
    "expected share": Case(
        lambda comm, x, **how: comm.scatter(x[: comm.size] if comm.rank == 0 else None, out=x[-1], **how),
        lambda comm, x, **how: comm.scatter(x[: comm.size, :-1].copy() if comm.rank == 0 else None, x[-1, :-1], **how),
        "scatter(float32 x {n} per rank, root 0)",
        "scatter(float32 x {less} per rank, root 0)",
    ),
    "counts": Case(
        lambda comm, x, **how: comm.all_gather(x[:1], counts=[1] * comm.size, **how),
        lambda comm, x, **how: comm.all_gather(x[:2], counts=[1 + (r == comm.rank) for r in range(comm.size)], **how),
        "all_gather(float32 x {all} in all, with counts)",
        "all_gather(float32 x {more} in all, with counts)",
    ),
    "counts of pairs": Case(
        lambda comm, x, **how: comm.all_reduce(x[0], out=x[1], **how),
        lambda comm, x, **how: comm.all_to_all(
            x[: comm.size], x[comm.size : 2 * comm.size], [1] * comm.size, [1] * comm.size, **how
        ),
        ALL_REDUCE,
        "all_to_all(float32, with counts)",
    ),
    "no counts": Case(
        lambda comm, x, **how: comm.all_gather(x[:1], **how),
        lambda comm, x, **how: comm.all_gather(x[:1], counts=[1] * comm.size, **how),
        "all_gather(float32 x {n} per rank)",
        "all_gather(float32 x {all} in all, with counts)",
    ),
}


# Where little data goes from the root or to it, some ranks have returned before they could see the mismatch.
ONE_WAY = {(name, SMALL) for name in ("collective", "gather", "root", "expected share")}


def describe(text, n, size):
    return text.format(n=n, less=n - 1, all=n * size, more=n * size + n)


def differ(comm, name, n, odd, async_op):
    """Rank `odd` makes a different call, several times: a start record has two slots."""
    case = CASES[name]
    words = [describe(case.other_words if rank == odd else case.usual_words, n, comm.size) for rank in range(comm.size)]
    before = np.arange((2 * comm.size + 1) * n, dtype=np.float32).reshape(-1, n) + comm.rank
    epochs = []
    for _ in range(3):
        x = before.copy()
        returned = False

        def call(x=x):
            nonlocal returned
            result = (case.other if comm.rank == odd else case.usual)(comm, x, async_op=async_op)
            if async_op:
                raised(MismatchError, result.wait)  # and again:
                result.wait()
            returned = True

        error = mismatch_of(comm, call)
        assert not returned or (name, n) in ONE_WAY
        assert "the ranks called different things at epoch" in str(error)
        for called in {*words}:
            who = format_ranks([rank for rank, other in enumerate(words) if other == called])
            assert f"  {who}: {called}" in str(error)
        assert name != "counts" or "other counts than on rank 0" in str(error)
        if not returned:
            np.testing.assert_array_equal(x, before)
        assert error.rank != comm.rank
        assert odd in (comm.rank, error.rank)
        assert (error.expected, error.got) == (words[comm.rank], words[error.rank])
        assert error.collective == error.expected.partition("(")[0]
        assert ", mismatch after " in lines_of(comm._transport.report(2))[comm.rank]
        epochs.append(error.epoch)
    assert epochs == list(range(epochs[0], epochs[0] + 6, 2)), "every call counted, on every rank, and the barriers"
    check_usable(comm)
    return epochs


@pytest.mark.parametrize("n", [SMALL, LARGE])
@pytest.mark.parametrize("name", CASES)
def test_a_mismatch_names_the_call_of_every_rank_and_changes_nothing(name, n, world):
    size = 2 + list(CASES).index(name) % 3
    epochs = harness.run(differ, size, name, n, size - 1, False, world=world)
    assert len({tuple(each) for each in epochs}) == 1


@pytest.mark.parametrize("name", CASES)
def test_a_queued_mismatch_is_raised_by_every_wait(name, world):
    size = 2 + (list(CASES).index(name) + 1) % 3
    harness.run(differ, size, name, LARGE, 0, True, world=world)


@pytest.mark.parametrize("how", [{}, {"timeout": 60.0}], ids=["fast", "slow"])
@pytest.mark.ranks(3)
def test_check_raises_the_error_of_a_dropped_work(comm, how):
    """Also where the work was dropped before its end; but not where a wait has raised it. No later call raises it."""

    def start(group):
        return group.all_reduce(np.ones(SMALL + (group.rank == 2)), async_op=True, **how)

    for ends_first in (False, True):
        work = start(comm)
        if ends_first:
            until(work.done, "the call")
        del work
        check_usable(comm)
        assert raised(MismatchError, comm.check).collective == "all_reduce"
        comm.check()
    work = start(comm)
    raised(MismatchError, work.wait)
    del work
    check_usable(comm)
    group = comm.split(0)
    work = start(group)
    until(work.done, "the call")
    del work
    raised(MismatchError, group.close)
    group.close()


def test_grow_logs_the_error_of_a_dropped_work(monkeypatch, caplog):
    """It has made the communicator that all ranks continue with."""
    comm, grown = ringcomm.init(), ringcomm.init()
    monkeypatch.setattr(comm, "_job", Mock(grow=lambda *_: grown))
    work = comm.all_to_all(np.ones(1), np.ones(2), send_counts=[1], recv_counts=[2], async_op=True)
    until(work.done, "the call")
    del work
    with comm.grow() as same:
        assert same is grown
    assert "rank 0 sends 1 elements to itself, but expects 2" in caplog.text


@pytest.mark.ranks(2)
def test_check_raises_the_error_of_a_dropped_receive(comm):
    if comm.rank == 0:
        comm.send(np.ones(4), 1)
    else:
        work = comm.recv(np.ones(3), 0, async_op=True)
        until(work.done, "the message")
        del work
        assert "rank 0 sent float64 x 4" in str(raised(MismatchError, comm.check))
        comm.check()
    check_usable(comm)


@pytest.mark.ranks(2)
def test_a_call_of_several_parts_does_not_raise_the_error_of_a_dropped_work(comm):
    """Rank 0 has seen the error in its wait, and would go on with the parts without rank 1."""
    work = comm.all_reduce(np.ones(SMALL + comm.rank), async_op=True)
    if comm.rank == 0:
        raised(MismatchError, work.wait)
    else:
        until(work.done, "the call")
    del work
    large = np.arange(1 << 18)
    np.testing.assert_array_equal(comm.broadcast_object(large if comm.rank == 0 else None), large)
    raised(MismatchError, comm.check) if comm.rank else comm.check()


@pytest.mark.ranks(4)
def test_a_mismatch_in_a_group_does_not_affect_others(comm):
    with comm.split(comm.rank % 2, key=-comm.rank) as group:
        for _ in range(2):
            if comm.rank % 2:
                check_usable(group)
            else:  # rank 2 of the world is rank 0 here
                differ(group, "count", LARGE, 0, False)
        check_usable(group)
    check_usable(comm)


@pytest.mark.ranks(2)
def test_a_split_does_not_raise_the_mismatch_of_a_call_before_it(comm):
    """The root has returned: the split, of several parts, succeeds on all ranks, and the next call raises it."""
    with suppress(MismatchError):
        comm.broadcast(np.zeros(SMALL if comm.rank else SMALL + 1))
    group = comm.split(0)
    if comm.rank == 0:
        assert "broadcast" in str(raised(MismatchError, comm.barrier))
    else:
        comm.barrier()
    assert group.all_reduce(np.ones(1)) == comm.size
    check_usable(comm)


@pytest.mark.ranks(4)
def test_four_ranks_may_make_four_different_calls(comm):
    calls = [
        comm.barrier,
        lambda: comm.all_reduce(np.zeros(3), "max"),
        lambda: comm.split(0),
        lambda: comm.gather(np.zeros(2, "i8"), root=2),
    ]
    words = ["barrier()", "all_reduce(float64 x 3, max)", "split()", "gather(int64 x 2 per rank, root 2)"]
    for shift in range(4):
        error = mismatch_of(comm, calls[(comm.rank + shift) % 4])
        for rank in range(4):
            assert f"rank {rank}: {words[(rank + shift) % 4]}" in str(error)
    check_usable(comm)


@pytest.mark.ranks(32, world="threads")
def test_a_mismatch_names_many_ranks_as_ranges(comm):
    error = raised(MismatchError, comm.barrier if comm.rank == 17 else lambda: comm.all_reduce(np.zeros(1000)))
    assert "rank 17: barrier()" in str(error)
    assert "ranks 0-16 and 18-31: all_reduce(float64 x 1000, sum)" in str(error)
    check_usable(comm)


def differ_in_the_same_sum_of_counts(comm):
    rows = [2, 1, 1] if comm.rank < 2 else [1, 2, 1]
    x = np.arange(4, dtype=np.int64)
    before = x.copy()
    error = raised(MismatchError, lambda: comm.reduce_scatter(x, counts=rows))
    assert "other counts than on rank 0" in str(error)
    np.testing.assert_array_equal(x, before)
    check_usable(comm)


def test_counts_of_one_sum_but_other_shares_are_a_mismatch(world):
    harness.run(differ_in_the_same_sum_of_counts, 3, world=world)


def differ_in_a_pair(comm, row):
    """Rank 1 sends two rows to rank 0, which expects one."""
    send = [1] * comm.size
    x = np.zeros((comm.size + 1, row), np.int16)
    out = np.full((comm.size, row), -1, np.int16)
    if comm.rank == 1:
        send[0] = 2
    rows = x[: sum(send)]
    for _ in range(3):
        error = raised(MismatchError, lambda: comm.all_to_all(rows, out, send_counts=send, recv_counts=[1] * comm.size))
        assert f"rank 1 sends {2 * row} elements to rank 0, which expects {row}" in str(error)
        assert (out == -1).all()
    check_usable(comm)


@pytest.mark.parametrize("row", [1, LARGE])
def test_a_pair_that_disagrees_in_all_to_all_is_named_on_every_rank(row, world):
    harness.run(differ_in_a_pair, 3, row, world=world)


@pytest.mark.parametrize("n", [SMALL, LARGE])
@pytest.mark.ranks(3)
def test_a_mismatch_leaves_symmetric_buffers_untouched(comm, n):
    x = comm.empty(n, np.float32)
    x[:] = comm.rank
    for size_of_odd in (n - 1, n):
        mine = x[:size_of_odd] if comm.rank == 0 else x
        error = raised(MismatchError, lambda mine=mine: comm.all_reduce(mine, "max" if comm.rank == 0 else "sum"))
        assert f"rank 0: all_reduce(float32 x {size_of_odd}, max)" in str(error)
        assert (x == comm.rank).all()
        if comm.rank == 0:  # a plain array on one rank, something else on another
            raised(MismatchError, lambda: comm.all_reduce(np.zeros(n, np.float32), "min"))
        else:
            raised(MismatchError, lambda: comm.all_reduce(x))
        assert (x == comm.rank).all()
    comm.barrier()  # until then a peer may write to this rank's buffer
    comm.all_reduce(x)
    assert (x == comm.size * (comm.size - 1) / 2).all()
    comm.barrier()


@pytest.mark.ranks(3)
def test_groups_buffers_and_objects_mismatch_under_their_own_names(comm):
    shapes = [(4,), (2, 2), (4,)]
    error = raised(MismatchError, lambda: comm.empty(shapes[comm.rank], "int8"))
    assert "empty((4,), int8, host) on ranks 0 and 2" in str(error)
    assert "empty((2, 2), int8, host) on rank 1" in str(error)
    assert error.collective == "empty"
    error = raised(MismatchError, lambda: comm.empty(4, "int8" if comm.rank == 2 else "uint8"))
    assert "int8" in str(error)
    for call, text in ((lambda: comm.split(0), "split()"), (lambda: comm.empty(4, "int8"), "empty()")):
        error = raised(MismatchError, comm.barrier if comm.rank == 1 else call)
        assert f"ranks 0 and 2: {text}" in str(error)
        assert "rank 1: barrier()" in str(error)
    error = mismatch_of(comm, lambda: comm.broadcast_object("x", root=comm.rank % 2))
    assert "broadcast" in str(error)
    check_usable(comm)


@pytest.mark.parametrize(
    ("sent", "expected", "dtype"),
    [(4, 5, "float32"), (4, 0, "float32"), (0, 4, "float32"), (4, 4, "int32"), (LARGE, 4, "float32"),
     (4, LARGE, "float32"), (LARGE, LARGE, "uint32"), (LARGE, LARGE - 1, "float32")],
)  # fmt: skip
@pytest.mark.ranks(3)
def test_a_message_that_does_not_fit_its_receive_is_refused(comm, sent, expected, dtype):
    """Rank 1 sends another size or dtype than rank 0 expects. If the message waits, both raise; rank 2 does not."""
    eager = sent <= 256
    if comm.rank == 1:
        data = np.ones(sent, np.float32)
        if eager:
            comm.send(data, 0, tag=7)
        else:
            error = raised(MismatchError, lambda: comm.send(data, 0, tag=7))
            assert f"send(float32 x {sent}, to 0) with tag 7" in str(error)
            assert (error.rank, error.peer) == (0, 0)
    elif comm.rank == 0:
        out = np.full(expected, 7, dtype)
        error = raised(MismatchError, lambda: comm.recv(out, 1, tag=7))
        assert f"rank 1 sent float32 x {sent}" in str(error)
        assert f"recv({np.dtype(dtype)} x {expected}, from 1) with tag 7" in str(error)
        assert (error.rank, error.peer) == (1, 1)
        assert (error.expected, error.got) == (f"{np.dtype(dtype)} x {expected}", f"float32 x {sent}")
        assert (out == 7).all()
    check_usable(comm)
