"""Plain calls take the fast path; all others give the same results and errors on the general path."""

import re
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_arguments import CALLS, NO_NUMBERS, zeros

import harness
from cases.no_fast_path import NO_FAST_PATH
from cases.reference import numpy_dtype
from harness.failures import check_usable, raised
from ringcomm import ArgumentError, premul_sum
from ringcomm.arrays.adapters import CODES
from ringcomm.native import NativeFastPath
from ringcomm.testing import check_transport, connect_threads
from ringcomm.transports import shm
from ringcomm.transports.fast_path import FastPath
from ringcomm.types import COLLECTIVES, DTYPES, PUBLIC
from ringcomm.work import StartedWork

F4 = np.float32
METHODS = [*PUBLIC, "send", "recv", "sendrecv"]


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_contract_has_the_methods_of_the_fast_path_and_no_others():
    """Without `__getattr__`: mypy finds a misspelt one."""
    assert public(FastPath) == public(NativeFastPath) == public(NO_FAST_PATH)
    assert public(NativeFastPath) >= {*METHODS}
    with pytest.raises(AttributeError):
        NO_FAST_PATH.all_redcue  # noqa: B018


class Paths:
    """Records which calls of a communicator take the fast path, and which the general one."""

    def __init__(self, comm):
        self.comm = comm
        self.before = comm.fast_path
        self.fast_path, self.general = [], []
        comm.fast_path = SimpleNamespace(**{name: partial(self.call, name) for name in METHODS})

    def call(self, name, *arguments):
        result = getattr(self.before, name)(*arguments)
        (self.general if result is NotImplemented else self.fast_path).append(name)
        return result

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.comm.fast_path = self.before


# --- The fast path ----------------------------------------------------------------------------------------------------


def plain_form(name, root, with_out):
    """Return a plain call of a collective on arrays x and y of shape (4, 3), as its row has it."""
    row = COLLECTIVES[name]

    def call(c, x, y):
        if not row.moves_data:
            return getattr(c, name)()
        gives, gets = row.gives(c.rank, root), row.gets(c.rank, root)
        options = {"root": root} if row.rooted and root else {}
        if row.reduces and with_out:
            options["op"] = "prod"
        if name != "broadcast" and gets and (with_out or not gives):
            options["out"] = y[:2] if row.got == "BLOCK" else y
        x = x[:2] if row.given == "BLOCK" and with_out else x
        return getattr(c, name)(x if gives or row.in_place else None, **options)

    return call


# Each method in its plain forms, for two ranks and arrays x and y of shape (4, 3).
PLAIN = {
    **{name: [plain_form(name, root=0, with_out=False), plain_form(name, root=1, with_out=True)] for name in PUBLIC},
    "send": [lambda c, x, y: c.send(x, 1 - c.rank), lambda c, x, y: c.send(x, 1 - c.rank, -3)],
    "recv": [lambda c, x, y: c.recv(x, 1 - c.rank), lambda c, x, y: c.recv(x, tag=-3)],
    "sendrecv": [
        lambda c, x, y: c.sendrecv(x, 1 - c.rank, y, None),
        lambda c, x, y: c.sendrecv(x, c.rank, y, c.rank, 1),
    ],
}


class Background:
    """A communicator whose calls run in the background, and are waited for."""

    def __init__(self, comm):
        self.comm, self.rank = comm, comm.rank

    def __getattr__(self, name):
        call = getattr(self.comm, name)

        def started(*arguments, **options):
            work = call(*arguments, **options, async_op=True)
            assert type(work) is StartedWork
            result = work.wait()
            assert work.done()
            assert work.result is result
            return result

        return started


def plain_calls(comm, make=zeros, background=False):
    x, y = make(4, 3), make(4, 3)
    with comm.split(0) as group:  # where other tests have used a GPU, a barrier does not take the fast path
        group.all_reduce(x)  # from here on the dtype is known
        for name, forms in PLAIN.items():
            for call in () if background and name == "sendrecv" else forms:
                with Paths(group) as paths:
                    result = call(Background(group) if background else group, x, y)
                assert result is None or type(result) in (type(x), int)
                assert (paths.fast_path, paths.general) == ([name], [])


def test_a_plain_call_takes_the_fast_path(world):
    harness.run(plain_calls, 2, world=world)


def test_so_does_a_plain_call_on_tensors():
    harness.run(partial(plain_calls, make=torch.zeros), 2)


@pytest.mark.parametrize("make", [zeros, torch.zeros])
def test_so_does_a_plain_call_in_the_background(make):
    harness.run(partial(plain_calls, make=make, background=True), 2)


@pytest.mark.ranks(2, world="processes")
def test_tensors_of_every_dtype_are_plain(comm):
    comm.broadcast(torch.zeros(1))  # from here on PyTorch's types are known
    for dtype in (getattr(torch, name) for name in DTYPES):
        for shape in ((), (0,), (3,), (1, 2, 3)):
            for kind in (torch.Tensor, torch.nn.Parameter):
                x = torch.full(shape, comm.rank, dtype=dtype)
                if kind is torch.nn.Parameter:
                    x = torch.nn.Parameter(x, requires_grad=dtype.is_floating_point)
                with Paths(comm) as paths:
                    joined = comm.all_gather(x)
                    assert comm.broadcast(x, 1) is x
                assert (paths.fast_path, paths.general) == (["all_gather", "broadcast"], [])
                assert (joined.shape, joined.dtype, type(joined)) == ((comm.size, *shape), dtype, torch.Tensor)
                expected = [torch.full(shape, rank, dtype=dtype) for rank in range(comm.size)]
                assert all(map(same, joined, expected))
                assert same(x.detach(), expected[1])


def same(x, y):
    return torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))


@pytest.mark.ranks(2, world="processes")
def test_arrays_of_every_dtype_are_plain(comm):
    for name in DTYPES:
        for shape in ((), (0,), (3,), (1, 2, 3)):
            x = np.zeros(shape, numpy_dtype(name))
            comm.broadcast(x)
            with Paths(comm) as paths:
                comm.broadcast(x)
                assert comm.all_gather(x).shape == (comm.size, *shape)
            assert (paths.fast_path, paths.general) == (["broadcast", "all_gather"], [])


@pytest.mark.ranks(2, world="processes")
def test_a_call_on_the_fast_path_keeps_no_reference(comm):
    x, y, t, u = zeros(2, 3), zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)
    right = (
        *(lambda: comm.all_gather(x), lambda: comm.all_reduce(x, "sum", y)),
        *(lambda: comm.all_gather(t), lambda: comm.reduce_scatter(t), lambda: comm.all_reduce(t, "sum", u)),
    )
    wrong = (
        *(lambda: comm.all_reduce(x[:, :1]), lambda: comm.all_reduce(x, "max", x.T), lambda: comm.all_reduce(x, "-")),
        *(lambda: comm.all_reduce(t.T), lambda: comm.all_reduce(t, out=t.to_sparse()), lambda: comm.scatter(t[0, 0])),
    )
    things = x, y, t, u, x.dtype, t.dtype, torch.Tensor, comm.fast_path, CODES

    def held():
        return [sys.getrefcount(thing) for thing in things]

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


# --- The general path -------------------------------------------------------------------------------------------------


class Mine(np.ndarray):
    pass


class MyTensor(torch.Tensor):
    pass


# Valid calls that are not plain. The last argument of each is a fresh array of shape (4,).
UNUSUAL = {
    "a subclass": lambda c, x: c.all_reduce(x.view(Mine)),
    "a subclass of tensors": lambda c, x: c.all_reduce(torch.from_numpy(x).as_subclass(MyTensor)),
    "an out that is a subclass": lambda c, x: c.all_reduce(
        torch.from_numpy(x), out=torch.zeros(4).as_subclass(MyTensor)
    ),
    "a buffer": lambda c, x: c.all_reduce(memoryview(x)),
    "an out that is a buffer": lambda c, x: c.all_reduce(x, out=memoryview(np.empty_like(x))),
    "a timeout": lambda c, x: c.all_reduce(x, timeout=5),
    "a timeout in the background": lambda c, x: c.all_reduce(x, timeout=5, async_op=True).wait(),
    "a factor": lambda c, x: c.all_reduce(x, premul_sum(0.5)),
    "an op of NumPy": lambda c, x: c.all_reduce(x, np.str_("sum")),
    "a root of NumPy": lambda c, x: c.broadcast(x, np.int64(1)),
    "a root that is a bool": lambda c, x: c.broadcast(x, True),
    "counts": lambda c, x: c.all_gather(x, counts=[4, 4]),
    "counts for all": lambda c, x: c.all_to_all(x, send_counts=[2, 2], recv_counts=[2, 2]),
    "a tag of NumPy": lambda c, x: c.sendrecv(x, 1 - c.rank, np.empty_like(x), None, np.int8(3)),
    "a timed message": lambda c, x: c.sendrecv(x, 1 - c.rank, np.empty_like(x), None, timeout=5),
}


@pytest.mark.ranks(2)
def test_a_call_that_is_not_plain_takes_the_general_path(comm):
    for name, call in UNUSUAL.items():
        x = np.arange(4, dtype=F4) + comm.rank
        with Paths(comm) as paths:
            call(comm, x)
        assert paths.fast_path == [], name
        assert len(paths.general) == 1, name


def error_of(call, comm):
    """Return the error of a call as text, without addresses."""
    try:
        call(comm)
    except Exception as error:
        return (
            type(error),
            re.sub(r"0x\w+", "somewhere", str(error)),
            {name: fact for name, fact in vars(error).items() if "0x" not in str(fact)},
        )
    raise AssertionError("the call worked")


@pytest.mark.ranks(3, world="threads")
def test_every_refusal_is_the_same_on_both_paths(comm):
    """Rank 1 makes wrong calls, each on both paths; the others do not notice."""
    calls = [call for call, _ in CALLS.values()]
    calls += [call for wrong in NO_NUMBERS.values() for call in wrong]
    calls += [lambda c: c.all_gather(zeros(1), counts=False)]
    calls += [
        lambda c: c.all_reduce(torch.zeros(4, 3).T),
        lambda c: c.all_reduce(torch.zeros(4).to_sparse()),
        lambda c: c.all_reduce(torch.zeros(4, device="meta")),
        lambda c: c.all_reduce(torch.zeros(4, dtype=torch.complex64).conj()),
        lambda c: c.all_reduce(torch.zeros(1, dtype=torch.complex64).conj().imag),
        lambda c: c.all_reduce(torch.zeros(4), out=torch.zeros(4, dtype=torch.int32)),
        lambda c: c.all_gather(torch.zeros(4), out=torch.zeros(4)),
        lambda c: c.all_to_all(torch.zeros(4)),
        lambda c: c.reduce_scatter(torch.tensor(1.0)),
        lambda c: torch.func.vmap(c.all_reduce)(torch.zeros(3, 2)),
    ]
    fast_path = comm.fast_path
    for call in calls if comm.rank == 1 else ():
        comm.fast_path = fast_path
        first = error_of(call, comm)
        comm.fast_path = NO_FAST_PATH
        assert error_of(call, comm) == first
    comm.fast_path = fast_path
    check_usable(comm)


def test_a_transport_needs_no_fast_path():
    def connect(size):
        ends = connect_threads(shm.connect, size)
        for end in ends:
            end.fast_path = NO_FAST_PATH
        return ends

    check_transport(connect, [3])
