"""The plain call goes to the core without Python on the way; every other one ends as if there were no such way."""

import re
import sys
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import harness
from failures import check_usable, raised
from reference import numpy_dtype
from ringcomm import ArgumentError, Communicator, premul_sum
from ringcomm.testing import CHECKS, connect_threads, run_threads
from ringcomm.transports import shm
from ringcomm.transports.contract import NOT_QUICK
from ringcomm.types import COLLECTIVES, DTYPES
from test_arguments import CALLS, NO_NUMBERS, WRONG_TYPES, zeros

F4 = np.float32
METHODS = [*(set(COLLECTIVES) - {"split", "empty"}), "send", "recv", "sendrecv"]


class Ways:
    """Which way the calls of a communicator go: how often each method was done quickly, and how often not."""

    def __init__(self, comm):
        self.comm = comm
        self.before = comm._quick
        self.quick, self.long = [], []
        comm._quick = SimpleNamespace(**{name: partial(self.call, name) for name in METHODS})

    def call(self, name, *arguments):
        result = getattr(self.before, name)(*arguments)
        (self.long if result is NotImplemented else self.quick).append(name)
        return result

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.comm._quick = self.before


# --- The quick way ----------------------------------------------------------------------------------------------------

# Each method in its plain forms, for two ranks and arrays x and y of shape (4, 3).
PLAIN = {
    "barrier": [lambda c, x, y: c.barrier()],
    "broadcast": [lambda c, x, y: c.broadcast(x), lambda c, x, y: c.broadcast(x, 1)],
    "reduce": [lambda c, x, y: c.reduce(x), lambda c, x, y: c.reduce(x, "max", 1, y)],
    "all_reduce": [lambda c, x, y: c.all_reduce(x), lambda c, x, y: c.all_reduce(x, "prod", out=y)],
    "gather": [lambda c, x, y: c.gather(x), lambda c, x, y: c.gather(x[:2], y, root=1)],
    "scatter": [
        lambda c, x, y: c.scatter(x if c.rank == 0 else None, y[:2]),
        lambda c, x, y: c.scatter(x, None if c.rank == 1 else y[:2], root=1),
    ],
    "all_gather": [lambda c, x, y: c.all_gather(x), lambda c, x, y: c.all_gather(x[:2], out=y)],
    "reduce_scatter": [lambda c, x, y: c.reduce_scatter(x), lambda c, x, y: c.reduce_scatter(x, "min", y[:2])],
    "all_to_all": [lambda c, x, y: c.all_to_all(x), lambda c, x, y: c.all_to_all(x, y)],
    "send": [lambda c, x, y: c.send(x, 1 - c.rank), lambda c, x, y: c.send(x, 1 - c.rank, -3)],
    "recv": [lambda c, x, y: c.recv(x, 1 - c.rank), lambda c, x, y: c.recv(x, tag=-3)],
    "sendrecv": [
        lambda c, x, y: c.sendrecv(x, 1 - c.rank, y, None),
        lambda c, x, y: c.sendrecv(x, c.rank, y, c.rank, 1),
    ],
}


def plain_calls(comm):
    x, y = zeros(4, 3), zeros(4, 3)
    with comm.split(0) as group:  # where other tests have used a GPU, a barrier does not go the quick way
        group.all_reduce(x)  # from here on the dtype is known
        for name, forms in PLAIN.items():
            for call in forms:
                with Ways(group) as ways:
                    call(group, x, y)
                assert (ways.quick, ways.long) == ([name], [])


def test_every_method_has_plain_forms():
    assert set(PLAIN) == set(METHODS)


def test_a_plain_call_goes_the_quick_way(world):
    harness.run(plain_calls, 2, world=world)


def plain_arrays(comm):
    for name in DTYPES:
        for shape in ((), (0,), (3,), (1, 2, 3)):
            x = np.zeros(shape, numpy_dtype(name))
            comm.broadcast(x)
            with Ways(comm) as ways:
                comm.broadcast(x)
                assert comm.all_gather(x).shape == (comm.size, *shape)
            assert (ways.quick, ways.long) == (["broadcast", "all_gather"], [])


def test_arrays_of_every_dtype_are_plain():
    harness.run(plain_arrays, 2)


def results(comm):
    """Return what the plain calls give, and what they leave in their arrays, one time each way."""
    both = []
    for quick in (comm._quick, NOT_QUICK):
        comm._quick, before = quick, comm._quick
        given = []
        for name, forms in PLAIN.items():
            for call in forms:
                x = (np.arange(12, dtype=ml_dtypes.bfloat16) + comm.rank).reshape(4, 3)
                y = np.full_like(x, 7)
                given.append((name, call(comm, x, y), x, y))
        comm._quick = before
        both.append(given)
    return both


def test_both_ways_give_the_same():
    for quick, slow in harness.run(results, 2):
        for ours, theirs in zip(quick, slow, strict=True):
            assert repr(ours) == repr(theirs)


def counted(comm):
    x, y = zeros(2, 3), zeros(2, 3)
    right = (lambda: comm.all_gather(x), lambda: comm.all_reduce(x, "sum", y))
    wrong = (lambda: comm.all_reduce(x[:, :1]), lambda: comm.all_reduce(x, "max", x.T), lambda: comm.all_reduce(x, "-"))

    def held():
        return [sys.getrefcount(thing) for thing in (x, y, x.dtype, comm._quick, shm.CODES)]

    def again():
        for call in right:
            call()
        for call in wrong:
            raised(ArgumentError, call)

    again()
    before = held()
    for _ in range(50):
        again()
    # Numbers and dtypes that are shared with the rest of the process may move a little.
    assert all(abs(now - then) < 10 for now, then in zip(held(), before, strict=True))


def test_a_quick_call_keeps_no_reference():
    harness.run(counted, 2)


# --- The long way -----------------------------------------------------------------------------------------------------


class Mine(np.ndarray):
    pass


# What is right, and not plain. The last argument of each is a fresh array of shape (4,).
UNUSUAL = {
    "a subclass": lambda c, x: c.all_reduce(x.view(Mine)),
    "a buffer": lambda c, x: c.all_reduce(memoryview(x)),
    "an out that is a buffer": lambda c, x: c.all_reduce(x, out=memoryview(np.empty_like(x))),
    "a timeout": lambda c, x: c.all_reduce(x, timeout=5),
    "asynchronous": lambda c, x: c.all_reduce(x, async_op=True).wait(),
    "a factor": lambda c, x: c.all_reduce(x, premul_sum(0.5)),
    "an op of NumPy": lambda c, x: c.all_reduce(x, np.str_("sum")),
    "a root of NumPy": lambda c, x: c.broadcast(x, np.int64(1)),
    "a root that is a bool": lambda c, x: c.broadcast(x, True),
    "counts": lambda c, x: c.all_gather(x, counts=[4, 4]),
    "counts for all": lambda c, x: c.all_to_all(x, send_counts=[2, 2], recv_counts=[2, 2]),
    "a tag of NumPy": lambda c, x: c.sendrecv(x, 1 - c.rank, np.empty_like(x), None, np.int8(3)),
    "a timed message": lambda c, x: c.sendrecv(x, 1 - c.rank, np.empty_like(x), None, timeout=5),
}


def unusual_calls(comm):
    for name, call in UNUSUAL.items():
        x = np.arange(4, dtype=F4) + comm.rank
        with Ways(comm) as ways:
            call(comm, x)
        assert ways.quick == [], name
        assert len(ways.long) == 1, name


def test_what_is_not_plain_goes_the_long_way(world):
    harness.run(unusual_calls, 2, world=world)


def said(call, comm):
    """Return the error of a call that cannot work, in words, without addresses."""
    try:
        call(comm)
    except Exception as error:
        return (
            type(error),
            re.sub(r"0x\w+", "somewhere", str(error)),
            {name: fact for name, fact in vars(error).items() if "0x" not in str(fact)},
        )
    raise AssertionError("the call worked")


def refusals(comm):
    """Rank 1 makes calls that cannot work, each both ways. The others know nothing of it."""
    calls = [call for call, _ in CALLS.values()] + list(WRONG_TYPES.values())
    calls += [call for wrong in NO_NUMBERS.values() for call in wrong]
    calls += [lambda c: c.all_gather(zeros(1), counts=False)]
    quick = comm._quick
    for call in calls if comm.rank == 1 else ():
        comm._quick = quick
        first = said(call, comm)
        comm._quick = NOT_QUICK
        assert said(call, comm) == first
    comm._quick = quick
    check_usable(comm)


def test_every_refusal_is_the_same_on_both_ways():
    harness.run(refusals, 3, world="threads")


def test_what_no_method_passes_is_not_plain():
    def call(comm):
        x = np.zeros(1, F4)
        comm.broadcast(x)
        for arguments in ((), (x,), (x, None), (x, None, 0), (x, None, 0, None, 0), (x, None, 0, False, False)):
            for name in METHODS:
                assert getattr(comm._quick, name)(*arguments) is NotImplemented, (name, arguments)
        assert comm._quick.broadcast(x, None, 0, None, False) is x

    harness.run(call, 1, world="threads")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_transport_needs_no_quick_calls(check):
    ends = connect_threads(shm.connect, 3)
    for end in ends:
        del end.quick
    run_threads(check, [Communicator(end) for end in ends])
