"""The backend of torch.distributed: every operation, with every kind of tensor."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from harness import torch_world
from ringcomm import ArgumentError

SIZES = (1, 2, 4)
sizes = pytest.mark.parametrize("size", SIZES)

NUMBERS = (
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
COMPLEX = (torch.complex64, torch.complex128)
MOVED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz, torch.complex32)


def value(rank, *shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 5 + rank + 1).to(torch.float32).to(dtype).reshape(shape)


def values(*shape, dtype=torch.float32):
    return [value(rank, *shape, dtype=dtype) for rank in range(dist.get_world_size())]


def same(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if got.element_size() == 1 or not got.dtype.is_floating_point:
        got, expected = got.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)
    assert torch.equal(got, expected), (got, expected)


def me():
    return dist.get_rank(), dist.get_world_size()


# --- Reductions -------------------------------------------------------------------------------------------------------


def folded(op, inputs):
    """Combine tensors in rank order as NumPy does, 16-bit floats in float32, rounded once."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    arrays = [x.to(wide).numpy() for x in inputs]
    function = {"SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
    bits = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
    with np.errstate(over="ignore"):
        for array in arrays[1:]:
            arrays[0] = (function | bits)[op](arrays[0], array)
    if op == "AVG":
        arrays[0] = arrays[0] / arrays[0].dtype.type(len(inputs))
    return torch.from_numpy(np.asarray(arrays[0])).to(dtype)


@torch_world.on(1, 2, 4)
def test_all_reduce_with_every_operation_and_dtype():
    rank, _ = me()
    for dtype in NUMBERS:
        integer = not dtype.is_floating_point
        for op in ("SUM", "PRODUCT", "MIN", "MAX", *(["BAND", "BOR", "BXOR"] if integer else ["AVG"])):
            inputs = values(7, 3, dtype=dtype)
            x = inputs[rank].clone()
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            same(x, folded(op, inputs))
    for dtype in COMPLEX:
        x = value(rank, 5, dtype=dtype) * (1 + 2j)
        dist.all_reduce(x)
        same(x, folded("SUM", [each * (1 + 2j) for each in values(5, dtype=dtype)]))
    x = torch.tensor([rank == 0, False, True])
    dist.all_reduce(x)
    same(x, torch.tensor([True, False, True]))
    dist.all_reduce(x, dist.ReduceOp.MIN)
    same(x, torch.tensor([True, False, True]))
    for factor in (0.5, torch.tensor([0.25])):
        x = value(rank, 9)
        dist.all_reduce(x, dist._make_nccl_premul_sum(factor))
        same(x, sum(each * float(factor) for each in values(9)))


def averages(dtype):
    """Average integers in every call; on Gloo as its users do: add, divide, and store as integers."""
    rank, size = me()
    ours, op = dist.get_backend() == "ringcomm", dist.ReduceOp.SUM
    if ours:
        op = dist.ReduceOp.AVG

    def averaged(x):
        return x if ours else x.copy_(x / size)

    x = (torch.arange(-6, 6 * size - 6) * (rank + 3) + rank).to(dtype)
    dist.all_reduce(everywhere := x.clone(), op)
    dist.reduce(at_root := x.clone(), 0, op)
    dist.reduce_scatter_tensor(share := torch.empty(6, dtype=dtype), x.clone(), op)
    dist.reduce_scatter(other := torch.empty(6, dtype=dtype), list(x.clone().chunk(size)), op)
    return [averaged(result).tolist() for result in (everywhere, *([at_root] if rank == 0 else []), share, other)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", [2, 4])
def test_averages_of_integers_are_truncated(size, dtype):
    assert torch_world.run(averages, size, dtype) == torch_world.run(averages, size, dtype, backend="gloo")


@torch_world.called_directly
@torch_world.on(2)
def test_invalid_arguments_are_refused_and_the_group_stays_usable():
    rank, _ = me()
    cases = [
        (value(rank, 3), dist.ReduceOp.BAND, "band"),
        (value(rank, 3, dtype=torch.float8_e4m3fn), dist.ReduceOp.SUM, "float8"),
        (value(rank, 3, 3).to_sparse_csr(), dist.ReduceOp.SUM, "sparse"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), dist.ReduceOp.SUM, "quantized"),
    ]
    for x, op, words in cases:
        with pytest.raises(ArgumentError, match=f"(?s){words}.*in the torch.distributed group"):
            dist.all_reduce(x, op)
    group = dist.group.WORLD
    wrong = [torch.empty(1), torch.empty(3)]
    calls = {
        "tensors with 2 elements": lambda: group.gather([wrong] if rank == 0 else [], [torch.ones(2)]),
        "tensors with 2 elements, got": lambda: group.scatter([torch.ones(2)], [wrong] if rank == 0 else []),
        "a tensor for each of 2 ranks": lambda: group.allgather([wrong[:1]], [torch.ones(1)]),
        "split sizes": lambda: group.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1], [1, 3]),
    }
    for words, call in calls.items():
        if rank == 0:
            with pytest.raises(ArgumentError, match=f"(?s){words}.*in the torch.distributed group"):
                call()
    x = value(rank, 3)
    dist.all_reduce(x)  # the group is still usable
    same(x, sum(values(3)))


@torch_world.on(1, 2, 4)
@torch_world.each("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_reduce_broadcast_gather_scatter_from_every_root(dtype):
    rank, size = me()
    for root in range(size):
        x = value(rank, 4, 2, dtype=dtype)
        dist.reduce(x, root)
        same(x, folded("SUM", values(4, 2, dtype=dtype)) if rank == root else value(rank, 4, 2, dtype=dtype))

        x = value(rank, 4, 2, dtype=dtype)
        dist.broadcast(x, root)
        same(x, value(root, 4, 2, dtype=dtype))

        gathered = [torch.empty(4, 2, dtype=dtype) for _ in range(size)] if rank == root else None
        dist.gather(value(rank, 4, 2, dtype=dtype), gathered, root)
        for got, expected in zip(gathered or (), values(4, 2, dtype=dtype), strict=rank == root):
            same(got, expected)

        x = torch.empty(3, dtype=dtype)
        dist.scatter(x, [value(10 * r, 3, dtype=dtype) for r in range(size)] if rank == root else None, root)
        same(x, value(10 * rank, 3, dtype=dtype))


# --- All to all -------------------------------------------------------------------------------------------------------


@torch_world.on(1, 2, 4)
@torch_world.each("dtype", [torch.float32, torch.bool, torch.complex64, *MOVED])
def test_all_gather_of_every_kind(dtype):
    rank, size = me()
    mine, all_of_them = value(rank, 3, 2, dtype=dtype), values(3, 2, dtype=dtype)
    separate = [torch.empty(3, 2, dtype=dtype) for _ in range(size)]
    adjacent = list(torch.empty(size, 3, 2, dtype=dtype))
    backwards = list(torch.empty(size, 3, 2, dtype=dtype))[::-1]
    for outputs in (separate, adjacent, backwards):
        dist.all_gather(outputs, mine)
        for got, expected in zip(outputs, all_of_them, strict=True):
            same(got, expected)
    for shape in ((size * 3, 2), (size, 3, 2)):
        out = torch.empty(shape, dtype=dtype)
        dist.all_gather_into_tensor(out, mine)
        same(out, torch.cat([x.view(torch.uint8) for x in all_of_them]).view(dtype).view(shape))


@torch_world.on(1, 2, 4)
def test_lists_may_be_uneven():
    rank, size = me()
    outputs = [torch.empty(r + 1, 2) for r in range(size)]
    dist.all_gather(outputs, value(rank, rank + 1, 2))
    for r, got in enumerate(outputs):
        same(got, value(r, r + 1, 2))
    out = torch.empty(rank + 1)
    dist.reduce_scatter(out, [value(rank, r + 1) for r in range(size)])
    same(out, sum(values(rank + 1)))


@torch_world.on(1, 2, 4)
@torch_world.each("dtype", [torch.float32, torch.float16, torch.int32])
def test_reduce_scatter_of_lists_and_tensors(dtype):
    rank, size = me()
    inputs = [[value(10 * source + to, 2, 3, dtype=dtype) for to in range(size)] for source in range(size)]
    expected = folded("SUM", [each[rank] for each in inputs])
    out = torch.empty(2, 3, dtype=dtype)
    dist.reduce_scatter(out, inputs[rank])
    same(out, expected)
    for shape in ((size * 2, 3), (size, 2, 3), (1, size * 6)):
        out = torch.empty(6, dtype=dtype) if shape[0] == 1 else torch.empty(2, 3, dtype=dtype)
        dist.reduce_scatter_tensor(out, torch.cat(inputs[rank]).view(shape))
        same(out.view(2, 3), expected)
    for block in (rank, 0):  # in place, and where the input of another rank's result lies
        x = torch.cat(inputs[rank])
        dist.reduce_scatter_tensor(x[2 * block : 2 * block + 2], x)
        same(x[2 * block : 2 * block + 2], expected)
        x = torch.cat(inputs[rank])
        dist.reduce_scatter(x[2 * block : 2 * block + 2], list(x.chunk(size)))
        same(x[2 * block : 2 * block + 2], expected)
    if dtype.is_floating_point:
        dist.reduce_scatter_tensor(out, torch.cat(inputs[rank]).view(-1), dist.ReduceOp.AVG)
        same(out.view(2, 3), folded("AVG", [each[rank] for each in inputs]))


@torch_world.on(1, 2, 4)
def test_all_to_all_of_lists_and_tensors_even_and_not():
    rank, size = me()
    outputs = [torch.empty(r + rank, 2) for r in range(size)]
    dist.all_to_all(outputs, [value(10 * rank + r, r + rank, 2) for r in range(size)])
    for r, got in enumerate(outputs):
        same(got, value(10 * r + rank, r + rank, 2))

    x = torch.cat([value(10 * rank + r, 2, 3) for r in range(size)])
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    same(out, torch.cat([value(10 * r + rank, 2, 3) for r in range(size)]))

    shared = torch.zeros(size, 3)
    shared[0] = value(rank, 3)
    dist.all_gather(list(shared), shared[0])  # the input lies where another rank's block will be
    same(shared, torch.stack(values(3)))
    shared[0] = value(rank, 3)
    dist.all_gather_into_tensor(shared, shared[0])
    same(shared, torch.stack(values(3)))

    odd = torch.float8_e4m3fnuz  # which ringcomm moves as bytes
    x = torch.cat([value(rank + r, 2, 3, dtype=torch.float32) for r in range(size)]).to(odd)
    out = torch.empty(size * 2, 3, dtype=odd)
    dist.all_to_all_single(out, x, [2] * size, [2] * size)
    same(out.float(), torch.cat([value(r + rank, 2, 3) for r in range(size)]))

    splits = [(rank + r) % 3 for r in range(size)]
    x = torch.cat([value(10 * rank + r, n, 3) for r, n in enumerate(splits)])
    out = torch.empty(sum(splits), 3)
    dist.all_to_all_single(out, x, splits, splits)
    same(out, torch.cat([value(10 * r + rank, n, 3) for r, n in enumerate(splits)]))


# --- Kinds of tensors -------------------------------------------------------------------------------------------------


@torch_world.on(1, 2, 4)
def test_scalars_and_empty_and_large_tensors():
    rank, size = me()
    for shape in ((), (0,), (0, 3), (1,), (70_001,)):
        x = value(rank, *shape)
        dist.all_reduce(x)
        same(x, sum(values(*shape)))
        x = value(rank, *shape)
        dist.broadcast(x, size - 1)
        same(x, value(size - 1, *shape))
        outputs = [torch.empty(shape) for _ in range(size)]
        dist.all_gather(outputs, value(rank, *shape))
        for got, expected in zip(outputs, values(*shape), strict=True):
            same(got, expected)
        out = torch.empty(shape)
        dist.reduce_scatter(out, [value(rank, *shape)] * size)
        same(out, sum(values(*shape)))


@torch_world.called_directly
@torch_world.on(1, 2, 4)
def test_tensors_with_strides_are_copied_once_and_written_back():
    rank, size = me()
    every_other = slice(None, None, 2)
    for view in (lambda x: x[every_other], lambda x: x[:, 1:3], lambda x: x.t()):
        whole = value(rank, 4, 6)
        untouched, part = whole.clone(), view(whole)
        dist.all_reduce(part)
        same(part.contiguous(), sum(view(x) for x in values(4, 6)).contiguous())
        view(untouched).copy_(part)
        same(whole, untouched)  # nothing beside it was written

        work = dist.all_reduce(part, async_op=True)
        work.wait()
        same(part.contiguous(), size * sum(view(x) for x in values(4, 6)).contiguous())

        whole = value(rank, 4, 6)
        dist.broadcast(view(whole), size - 1)
        same(view(whole).contiguous(), view(value(size - 1, 4, 6)).contiguous())

        out = torch.zeros(size, *part.t().shape).transpose(1, 2)
        work = dist.all_gather(list(out), view(value(rank, 4, 6)), async_op=True)
        while not work.is_completed():
            pass
        for got, expected in zip(out, values(4, 6), strict=True):
            same(got.contiguous(), view(expected).contiguous())
    pairs = [torch.empty(2, dtype=torch.complex64) for _ in range(size)]
    dist.group.WORLD.allgather([pairs], [torch.tensor([1 + 2j, 3 - 1j]).conj()]).wait()
    same(pairs[0], torch.tensor([1 - 2j, 3 + 1j]))
    expanded = value(rank, 6).expand(3, 6)
    with pytest.raises(ArgumentError, match="memory for each element"):  # a result has no place there
        dist.all_reduce(expanded)
    outputs = [torch.empty(3, 6) for _ in range(size)]
    dist.all_gather(outputs, expanded)
    same(outputs[-1], value(size - 1, 6).expand(3, 6).contiguous())


@torch_world.on(2)
def test_tensors_that_require_grad():
    rank, _ = me()
    x = value(rank, 3).requires_grad_()
    dist.all_reduce(x)
    same(x.detach(), sum(values(3)))
    x = value(rank, 4, 3).requires_grad_()
    with torch.no_grad():
        part = x[:, 1]
    dist.all_reduce(part)
    same(x[:, 1].detach(), sum(v[:, 1] for v in values(4, 3)))
    x = torch.nn.Parameter(value(rank, 4, 3).t())
    dist.broadcast(x, 0)
    same(x.detach(), value(0, 4, 3).t())
    assert x.requires_grad
    assert x.grad is None


# --- Point to point ---------------------------------------------------------------------------------------------------


@torch_world.called_directly
@torch_world.on(2, 4)
def test_messages_between_ranks():
    rank, size = me()
    right, left = (rank + 1) % size, (rank - 1) % size
    for length in (0, 1, 1000, 300_001):
        for tag in (0, 7):
            out = torch.empty(length)
            if rank % 2 == 0:
                dist.send(value(rank, length), right, tag=tag)
                assert dist.recv(out, left, tag=tag) == left
            else:
                dist.recv(out, left, tag=tag)
                dist.send(value(rank, length), right, tag=tag)
            same(out, value(left, length))
        ops = [
            dist.P2POp(dist.isend, value(rank, length), right),
            dist.P2POp(dist.isend, value(rank, length, dtype=torch.int16), left),
            dist.P2POp(dist.irecv, here := torch.empty(length), left),
            dist.P2POp(dist.irecv, there := torch.empty(length, dtype=torch.int16), right),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if left != right:
            same(here, value(left, length))
            same(there, value(right, length, dtype=torch.int16))
    if rank:
        dist.send(value(rank, 5), 0, tag=3)
    else:
        seen = set()
        for _ in range(size - 1):
            out = torch.empty(5)
            sender = dist.recv(out, tag=3)
            same(out, value(sender, 5))
            seen.add(sender)
        assert seen == set(range(1, size))
    strided = torch.zeros(3, 4)
    works = [dist.isend(value(rank, 4, 3).t(), right, tag=9), dist.irecv(strided.t(), left, tag=9)]
    for work in works:
        work.wait()
    same(strided.t().contiguous().view(3, 4), value(left, 4, 3).t().contiguous())


def larger_receives():
    """Return what a receive of a shorter message leaves in its tensor."""
    rank, _ = me()
    outs = [torch.zeros(5), torch.zeros(3, 2).t(), torch.full((70_000,), 7.0)]
    for tag, out in enumerate(outs):
        if rank == 0:
            dist.send(torch.arange(1.0, max(4, out.numel() - 4)), 1, tag=tag)
        else:
            dist.recv(out, 0, tag=tag)
    return [out.numpy() for out in outs]


def test_a_receive_into_a_larger_tensor_fills_its_front():
    _, (first, transposed, long) = torch_world.run(larger_receives, 2)
    assert first.tolist() == [1, 2, 3, 0, 0]
    assert transposed.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert long[:69_995].tolist() == list(range(1, 69_996))
    assert long[69_995:].tolist() == [7] * 5
    _, (gloo, *_) = torch_world.run(first_receive, 2, backend="gloo")
    assert gloo.tolist() == first.tolist()


def first_receive():
    rank, _ = me()
    out = torch.zeros(5)
    if rank == 0:
        dist.send(torch.arange(1.0, 4), 1)
    else:
        dist.recv(out, 0)
    return [out.numpy()]
