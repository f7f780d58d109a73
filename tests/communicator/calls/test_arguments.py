"""Calls that cannot work: refused on the rank that makes them, before anything is sent."""

import re

import numpy as np
import pytest

from harness.failures import check_usable, raised
from ringcomm import ArgumentError
from ringcomm.bench.machine import gpus

F4, I8, C8 = np.float32, np.int64, np.complex64


class OnGpu:
    """An array with the interface of CuPy's."""

    __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}  # noqa: RUF012


def read_only(length):
    x = np.zeros(length, F4)
    x.flags.writeable = False
    return x


def masked(length):
    return np.ma.array(zeros(length), mask=[True] * length)


def zeros(*shape, dtype=F4):
    return np.zeros(shape, dtype)


READ_ONLY = "a writable one, got a read-only one"
TIMEOUT = "timeout: expected seconds >= 0"

# Each is called on one rank of three; its error must match the pattern: the expected value, then the given one.
CALLS = {
    # The array
    "a list": (lambda c: c.all_reduce([1.0]), "NumPy, PyTorch, the buffer protocol or DLPack, got list"),
    "objects": (lambda c: c.all_reduce(np.array([None])), "one of bool, .*float32.*, got object"),
    "every second element": (lambda c: c.all_reduce(zeros(6)[::2]), "C-contiguous, got .*float32, shape \\(3,\\)"),
    "a masked array": (lambda c: c.all_reduce(masked(3)), "without a mask .*x.data or x.filled.*, got MaskedArray"),
    "a masked out": (lambda c: c.all_gather(zeros(1), out=masked(3)), "without a mask .*, got MaskedArray"),
    "a strided out": (lambda c: c.all_reduce(zeros(3), out=zeros(6)[::2]), "C-contiguous"),
    # Read-only outputs
    "read-only in place": (lambda c: c.all_reduce(read_only(4)), f"{READ_ONLY} .*float32, shape \\(4,\\)"),
    "read-only out": (lambda c: c.all_reduce(zeros(4), out=read_only(4)), READ_ONLY),
    "bytes": (lambda c: c.recv(b"abc"), READ_ONLY),
    "read-only, to be received": (lambda c: c.recv(read_only(4), 0), READ_ONLY),
    "read-only, to be broadcast into": (lambda c: c.broadcast(read_only(4), root=2), READ_ONLY),
    "read-only on the root": (lambda c: c.reduce(read_only(4), root=1), READ_ONLY),
    "a read-only gathered array": (lambda c: c.all_gather(zeros(2), out=read_only(6)), READ_ONLY),
    # Outputs that do not fit
    "a short out": (lambda c: c.all_reduce(zeros(4), out=zeros(3)), "4 elements of float32, got 3 of float32"),
    "another dtype": (lambda c: c.all_reduce(zeros(4), out=zeros(4, dtype=I8)), "of float32, got 4 of int64"),
    "too little to gather": (lambda c: c.all_gather(zeros(4), out=zeros(8)), "12 elements of float32, got 8"),
    "too much to gather": (lambda c: c.gather(zeros(4), out=zeros(16), root=1), "12 elements of float32, got 16"),
    "a wrong share": (lambda c: c.reduce_scatter(zeros(6), out=zeros(3)), "2 elements of float32, got 3"),
    "a wrong scattered share": (lambda c: c.scatter(zeros(6), out=zeros(3), root=1), "2 elements of float32, got 3"),
    "no out": (lambda c: c.scatter(root=0), "out of scatter on rank 1: expected an array.*root 0.*, got None"),
    "a wrong exchange": (lambda c: c.all_to_all(zeros(3), out=zeros(4)), "3 elements of float32, got 4"),
    "a root without x": (lambda c: c.scatter(None, root=1), "got NoneType"),
    # Outputs that overlap
    "a shifted out": (lambda c: (lambda x: c.all_reduce(x[:4], out=x[1:5]))(zeros(5)), "overlaps the input"),
    "a backward out": (lambda c: (lambda x: c.all_reduce(x[1:5], out=x[:4]))(zeros(5)), "overlaps the input"),
    "another rank's block": (lambda c: (lambda x: c.all_gather(x[0], out=x))(zeros(3, 2)), "overlaps the input"),
    "a gathered overlap": (lambda c: (lambda x: c.gather(x[:2], out=x[1:], root=1))(zeros(7)), "overlaps the input"),
    "another rank's share": (lambda c: (lambda x: c.reduce_scatter(x, out=x[:1]))(zeros(3)), "overlaps the input"),
    "a scattered overlap": (lambda c: (lambda x: c.scatter(x, out=x[1:], root=1))(zeros(3, 1)), "expected|overlaps"),
    "an exchanged overlap": (lambda c: (lambda x: c.all_to_all(x[:3], out=x[1:]))(zeros(4)), "overlaps the input"),
    "an uneven exchange in place": (
        lambda c: (lambda x: c.all_to_all(x, out=x, send_counts=[1, 2, 3], recv_counts=[3, 2, 1]))(zeros(6)),
        "overlaps the input",
    ),
    "a message over itself": (lambda c: (lambda x: c.sendrecv(x, 0, x, 0, timeout=0.1))(zeros(3)), "overlaps"),
    "a queued message over itself": (lambda c: (lambda x: c.sendrecv(x, 0, x, 0, async_op=True))(zeros(3)), "overlaps"),
    "a message over its end": (lambda c: (lambda x: c.sendrecv(x[:3], 0, x[2:], 0, timeout=0.1))(zeros(5)), "overlaps"),
    # Operations
    "an op of other dtypes": (
        lambda c: c.reduce_scatter(zeros(3, dtype=C8), "min"),
        "op of complex64: expected one of sum, .*, got min",
    ),
    "an unknown op": (lambda c: c.all_reduce(zeros(1), "summ"), "unknown op.* 'summ'; did you mean 'sum'"),
    "no op": (lambda c: c.reduce(zeros(1), None), "unknown op"),
    # Ranks
    "a root too high": (lambda c: c.broadcast(zeros(1), root=3), "root: expected a rank from 0 to 2, got 3"),
    "a negative root": (lambda c: c.gather(zeros(1), root=-1), "root: expected a rank from 0 to 2, got -1"),
    "an object's root too high": (lambda c: c.gather_object(1, root=3), "root: expected a rank from 0 to 2, got 3"),
    "a peer too high": (lambda c: c.send(zeros(1), 3), "peer: expected a rank from 0 to 2, got 3"),
    "a negative peer": (lambda c: c.recv(zeros(1), -1), "peer: expected a rank from 0 to 2, got -1"),
    "a dest too high": (lambda c: c.sendrecv(zeros(1), 3, zeros(1), 0), "dest: expected a rank from 0 to 2, got 3"),
    "a source too low": (lambda c: c.sendrecv(zeros(1), 0, zeros(1), -2), "source: expected a rank .*, got -2"),
    # Counts
    "rows that do not divide": (lambda c: c.reduce_scatter(zeros(4)), "multiple of 3 rows, or counts, got 4 rows"),
    "rows that do not scatter": (lambda c: c.scatter(zeros(4), root=1), "multiple of 3 rows, or counts, got 4 rows"),
    "a share of a number": (lambda c: c.all_to_all(np.array(1.0)), "an axis to divide among the ranks, got a single"),
    "too few counts": (lambda c: c.all_gather(zeros(1), counts=[1, 1]), "3 numbers >= 0, got \\[1, 1\\]"),
    "a negative count": (lambda c: c.gather(zeros(1), counts=[1, 1, -1]), "3 numbers >= 0, got \\[1, 1, -1\\]"),
    "counts of other rows": (lambda c: c.reduce_scatter(zeros(5), counts=[1, 1, 1]), "\\(5,\\), got 3 rows in all"),
    "another count of its own": (lambda c: c.all_gather(zeros(2), counts=[2, 1, 2]), "expected 1, got shape \\(2,\\)"),
    "counts of one side": (lambda c: c.all_to_all(zeros(3), send_counts=[1, 1, 1]), "both send_counts and recv_counts"),
    # Timeouts, groups, buffers
    "a negative timeout": (lambda c: c.all_reduce(zeros(1), timeout=-0.1), f"{TIMEOUT}.*, got -0.1"),
    "a queued negative timeout": (lambda c: c.barrier(timeout=-1, async_op=True), TIMEOUT),
    "a negative wait": (lambda c: c.send(zeros(1), c.rank, tag=99, async_op=True).wait(timeout=-1), TIMEOUT),
    "a negative length": (lambda c: c.empty((2, -1), F4), "shape: expected lengths >= 0, got \\(2, -1\\)"),
    "an unknown dtype": (lambda c: c.empty(1, "flaot32"), "unknown dtype 'flaot32'; did you mean 'float32'"),
    "a buffer of objects": (lambda c: c.empty(1, object), "one of .*, got object"),
    "another device": (lambda c: c.empty(1, F4, device="tpu"), "unknown device 'tpu'; known: cuda, emulated, host"),
}
NO_GPU = "arrays on a GPU need CuPy|no GPU can be used"
if not gpus():
    CALLS |= {
        "an array on a GPU": (lambda c: c.all_reduce(OnGpu()), NO_GPU),
        "an out on a GPU": (lambda c: c.all_reduce(zeros(4), out=OnGpu()), NO_GPU),
        "a GPU that there is not": (lambda c: c.empty(1, F4, device="cuda"), NO_GPU),
    }


@pytest.mark.ranks(3)
def test_a_call_is_refused_with_what_was_expected_and_given_and_leaves_the_ranks_in_step(comm):
    """Rank 1 makes calls that are refused; the others do not notice."""
    for name, (call, words) in CALLS.items():
        if comm.rank == 1:
            error = raised(ArgumentError, lambda call=call: call(comm))
            assert re.search(words, str(error)), f"{name}: {error}"
        comm.barrier()
    check_usable(comm)


@pytest.mark.ranks(3)
def test_a_refused_call_queues_nothing(comm):
    if comm.rank == 1:
        x = zeros(5)
        for call in (
            lambda: comm.all_reduce(x[:4], out=x[1:], async_op=True),
            lambda: comm.all_reduce(x, "max of all", async_op=True),
            lambda: comm.broadcast(x, root=3, async_op=True),
            lambda: comm.recv(read_only(3), 0, async_op=True),
            lambda: comm.sendrecv(x, 2, read_only(3), 0, async_op=True),
        ):
            raised(ArgumentError, call)
    check_usable(comm)


@pytest.mark.ranks(1)
def test_a_single_rank_refuses_the_same_calls(comm):
    x = zeros(4)
    raised(ArgumentError, lambda: comm.all_reduce(x[:3], out=x[1:]))
    raised(ArgumentError, lambda: comm.all_reduce(zeros(1, dtype=C8), "max"))
    raised(ArgumentError, lambda: comm.broadcast(x, root=1))
    raised(ArgumentError, lambda: comm.all_reduce(read_only(1)))
    check_usable(comm)


HUGE = 10**2500  # longer than a fact that ranks exchange

# Of the wrong type or out of range, by the name of the argument.
NO_NUMBERS = {
    "root": [
        lambda c: c.broadcast(zeros(1), 0.5),
        lambda c: c.reduce(zeros(1), root="0"),
        lambda c: c.reduce(0, root=None),
        lambda c: c.broadcast_object(1, root="0"),
    ],
    "peer": [lambda c: c.send(zeros(1), None), lambda c: c.recv(zeros(1), 1.0), lambda c: c.recv(zeros(1), HUGE)],
    "tag": [
        *(lambda c, tag=tag: c.send(zeros(1), 0, tag) for tag in ("x", "", None, 0.0, 1.5, 2**63, -HUGE)),
        lambda c: c.send(zeros(1), 0, tag=2**63, async_op=True),
    ],
    "op": [lambda c: c.all_reduce(zeros(1), ["sum"]), lambda c: c.reduce_scatter(zeros(3), {})],
    "counts": [
        lambda c, counts=counts: c.all_gather(zeros(1), counts=counts) for counts in ([1.5] * 3, 3, "abc", [1, 1, HUGE])
    ],
    "send_counts": [lambda c: c.all_to_all(zeros(3), send_counts=[1, 1, None], recv_counts=[1, 1, 1])],
    "timeout": [lambda c, t=t: c.all_reduce(zeros(1), timeout=t) for t in ("3", [3], float("nan"), np.ones(2), HUGE)],
    "shape": [
        lambda c, shape=shape: c.empty(shape, F4)
        for shape in ((1.5,), "ab", None, [[2]], np.array([2.0]), (1,) * 65, HUGE, (HUGE, 0), (2**63,) * 64)
    ],
    "color": [lambda c: c.split(HUGE), lambda c: c.split(2**63), lambda c: c.split("red")],
    "key": [lambda c: c.split(0, -HUGE), lambda c: c.split(0, None)],
    "calls": [lambda c, calls=calls: c.report(calls) for calls in (-1, 0, 1.5, "3", HUGE)],
    "reason": [lambda c, reason=reason: c.abort(reason) for reason in (None, 3, b"bytes")],
}


@pytest.mark.ranks(3, world="threads")
def test_an_argument_of_the_wrong_type_is_refused_by_name(comm):
    for name, calls in NO_NUMBERS.items():
        for call in calls if comm.rank == 1 else ():
            assert re.match(f"(unknown )?{name}[: ]", str(raised(ArgumentError, lambda call=call: call(comm))))
        comm.barrier()
    check_usable(comm)


@pytest.mark.ranks(2)
def test_a_refusal_names_its_rank(comm):
    errors = [
        raised(ArgumentError, lambda: comm.broadcast(zeros(1), root=7)),
        raised(ArgumentError, lambda: comm.all_gather(zeros(1), counts=[1])),
        raised(ArgumentError, lambda: comm.reduce_scatter(zeros(comm.size + 1))),
        raised(ArgumentError, lambda: comm.scatter(root=1 - comm.rank)),
    ]
    assert [error.rank for error in errors] == [comm.rank] * len(errors)
    assert errors[-1].collective == "scatter"


@pytest.mark.ranks(2)
def test_a_shape_may_be_any_sequence_of_integers(comm):
    for shape, expected in (
        (np.array([2, 3]), (2, 3)),
        (np.int8(4), (4,)),
        ((1,) * 32, (1,) * 32),
        (range(3), (0, 1, 2)),
    ):
        assert comm.empty(shape, F4).shape == expected


@pytest.mark.ranks(2)
def test_a_report_of_more_calls_than_recorded_has_all_recorded_calls(comm):
    comm.barrier()
    for _ in range(1100):
        comm.all_reduce(zeros(1))
    text = comm.report(2**60)
    assert text.splitlines()[comm.rank].count("all_reduce(float32 x 1, sum) epoch ") == 1023
    assert len(text.splitlines()) == comm.size
    comm.barrier()
