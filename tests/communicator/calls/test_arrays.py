"""Kinds of arrays, end to end: results have the kind of the input and the right values."""

import array
import ctypes
import mmap

import numpy as np
import pytest
import torch

from cases.collectives import Exporter
from cases.reference import COMBINATIONS, assert_same, filled, numpy_dtype, reduced
from ringcomm.types import DTYPES

SUMMED = {name for name, op in COMBINATIONS if op == "sum"}


def tensor(values):
    """Return a tensor with the bits of a NumPy array, also where NumPy and torch do not know each other's dtype."""
    raw = torch.from_numpy(values.reshape(-1).view(np.uint8).copy())
    return raw.view(getattr(torch, values.dtype.name)).reshape(values.shape)


def values(x):
    """Return the memory of a tensor as a NumPy array."""
    dtype = numpy_dtype(str(x.dtype).removeprefix("torch."))
    return x.detach().reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tuple(x.shape))


def from_memory(make):
    """Return a maker that fills what `make(bytes)` returns by the buffer protocol."""

    def filled_by(x):
        made = make(x.nbytes)
        memoryview(made).cast("B")[:] = x.tobytes()
        return made

    return filled_by


# Maker of the array from NumPy's, the dtypes it can have, and the kind of new arrays.
KINDS = {
    "ndarray": (lambda x: x, list(DTYPES), np.ndarray),
    "memmap": (lambda x: x.view(np.memmap), ["float32", "bool"], np.ndarray),
    "bytearray": (bytearray, ["uint8"], np.ndarray),
    "array": (lambda x: array.array(x.dtype.char, x.tobytes()), ["int8", "uint16", "int64", "float32"], np.ndarray),
    "memoryview": (lambda x: x.data, ["bool", "int32", "float16", "float64", "complex64"], np.ndarray),
    "ctypes": (from_memory(lambda size: (ctypes.c_float * (size // 4))()), ["float32"], np.ndarray),
    "mmap": (from_memory(lambda size: mmap.mmap(-1, size)), ["uint8"], np.ndarray),
    "DLPack of NumPy": (Exporter, ["int16", "float32", "complex128"], np.ndarray),
    "DLPack of torch": (lambda x: Exporter(tensor(x)), ["int16", "float32", "complex128"], np.ndarray),
    "Tensor": (tensor, list(DTYPES), torch.Tensor),
    "Parameter": (lambda x: torch.nn.Parameter(tensor(x)), ["bfloat16", "float32"], torch.Tensor),
}


def content(x):
    if isinstance(x, torch.Tensor):
        return values(x)
    return np.from_dlpack(x) if isinstance(x, Exporter) else np.asarray(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(2, world="processes")
def test_a_kind_of_array_goes_through_every_collective(comm, kind):
    make, names, new = KINDS[kind]
    for name in names:
        inputs = [filled(rank, 6 * comm.size, name) for rank in range(comm.size)]

        def mine():
            return make(inputs[comm.rank].copy())  # noqa: B023 (called in this turn of the loop)

        def expect(result, expected, kind):
            assert isinstance(result, kind), type(result)
            got = content(result)
            if got.dtype == np.uint8 != expected.dtype:  # mmap and bytearray know bytes only
                got = got.view(expected.dtype)
            assert_same(got, expected, f"{name} on rank {comm.rank}")  # noqa: B023 (called in this turn)

        x = mine()
        assert comm.broadcast(x, root=1) is x
        expect(x, inputs[1], type(x))
        expect(comm.all_gather(mine()), np.stack(inputs), new)
        counts = [6 * comm.size] * comm.size
        expect(comm.all_gather(mine(), counts=counts), np.concatenate(inputs), new)
        x, y = mine(), mine()
        assert comm.all_to_all(x, out=y) is y
        blocks = [np.split(x, comm.size)[comm.rank] for x in inputs]
        expect(y, np.concatenate(blocks), type(x))
        if comm.rank == 1:
            expect(comm.scatter(x, root=1), np.split(inputs[1], comm.size)[1], new)
            comm.send(x, peer=0, tag=3)
        else:
            part = make(inputs[0][:6].copy())
            assert comm.scatter(None, out=part, root=1) is part
            expect(part, inputs[1][:6], type(part))
            assert comm.recv(x, peer=1, tag=3) == 1
            expect(x, inputs[1], type(x))
        if name in SUMMED:
            x, total = mine(), reduced(inputs, "sum")
            expect(comm.reduce_scatter(x), np.split(total, comm.size)[comm.rank], new)
            assert comm.all_reduce(x) is x
            expect(x, total, type(x))
            result = comm.reduce(mine(), root=1)
            if comm.rank == 1:
                expect(result, total, type(x))


@pytest.mark.ranks(3)
def test_ranks_may_pass_different_kinds_of_arrays(comm):
    inputs = [filled(rank, 5, "float32") for rank in range(3)]
    x = [tensor, lambda x: x, lambda x: array.array("f", x.tobytes())][comm.rank](inputs[comm.rank])
    gathered = comm.all_gather(x)
    assert isinstance(gathered, torch.Tensor if comm.rank == 0 else np.ndarray)
    assert_same(content(gathered), np.stack(inputs))
    out = torch.empty(5)
    assert comm.all_reduce(x, out=out) is out
    assert_same(values(out), reduced(inputs, "sum"))


@pytest.mark.ranks(2)
def test_tensors_that_require_a_gradient_are_raw_memory(comm):
    x = torch.full((3,), comm.rank + 1.0, requires_grad=True)
    (x * x).sum().backward()
    assert comm.all_reduce(x.grad, op="avg") is x.grad
    assert_same(values(x.grad), np.full(3, comm.size + 1.0, np.float32))
    assert comm.all_reduce(x) is x
    assert x.requires_grad
    assert not comm.all_gather(x).requires_grad


@pytest.mark.ranks(2)
def test_a_gathered_array_has_the_rank_as_a_new_first_axis(comm):
    for shape in [(), (0,), (1,), (2, 3), (3, 0, 2)]:
        for make in (np.ones, torch.ones):
            gathered = comm.all_gather(make(shape))
            assert tuple(gathered.shape) == (comm.size, *shape)
            assert (content(gathered) == 1).all()
    assert_same(comm.all_gather(b"abcd")[0], np.frombuffer(b"abcd", np.uint8))


@pytest.mark.ranks(3)
def test_the_root_of_a_broadcast_may_have_a_read_only_array(comm):
    x = memoryview(b"constant") if comm.rank == 1 else bytearray(8)
    assert comm.broadcast(x, root=1) is x
    assert x == b"constant"
