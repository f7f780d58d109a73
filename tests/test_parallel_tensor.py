"""Tensor parallelism against one process, in float64: values, gradients of inputs and of every parameter, bytes."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import (
    ColumnParallelLinear,
    Grid,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    SplitDropout,
    SplitLayerNorm,
    VocabParallelEmbedding,
    all_gather,
    copy_to,
    gather_from,
    own,
    reduce_from,
    reduce_scatter,
    scatter_to,
    seed_ranks,
    splits,
    to_full,
)
from ringcomm.parallel.functional import joined, part

BACKENDS = pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
SIZES = pytest.mark.parametrize("size", [1, 2, 4])
B, S, H = 2, 8, 16


def close(got, expected):
    assert got.shape == expected.shape
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12), float((got - expected).abs().max())


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- Collectives with gradients ---------------------------------------------------------------------------------------

# The function; what it makes of the ranks' inputs xs on rank r; what it makes of their gradients, on the way back.
PAIRS = {
    "copy_to": (copy_to, lambda xs, r, dim: xs[r], lambda gs, r, dim: sum(gs)),
    "reduce_from": (reduce_from, lambda xs, r, dim: sum(xs), lambda gs, r, dim: gs[r]),
    "gather_from": (gather_from, lambda xs, r, dim: torch.cat(xs, dim), lambda gs, r, dim: slice_of(gs[r], r, dim)),
    "scatter_to": (scatter_to, lambda xs, r, dim: slice_of(xs[r], r, dim), lambda gs, r, dim: torch.cat(gs, dim)),
    "all_gather": (all_gather, lambda xs, r, dim: torch.cat(xs, dim), lambda gs, r, dim: slice_of(sum(gs), r, dim)),
    "reduce_scatter": (
        reduce_scatter,
        lambda xs, r, dim: slice_of(sum(xs), r, dim),
        lambda gs, r, dim: torch.cat(gs, dim),
    ),
}


def slice_of(x, rank, dim):
    return x.chunk(dist.get_world_size(), dim)[rank]


def pairs():
    tp, rank, size = Grid(tp=dist.get_world_size()).tp, dist.get_rank(), dist.get_world_size()
    for (name, (function, forward, backward)), dim in itertools.product(PAIRS.items(), (0, 1, -1)):
        cuts = dim if name not in ("copy_to", "reduce_from") else None
        xs = [drawn(4, 8, 12, seed=r) for r in range(size)]
        x = xs[rank].clone().requires_grad_()
        y = function(x, tp) if cuts is None else function(x, tp, cuts)
        close(y, forward(xs, rank, dim))
        gs = [drawn(*y.shape, seed=100 + r) for r in range(size)]
        grad = gs[rank].clone()
        y.backward(grad)
        close(x.grad, backward(gs, rank, dim))
        assert x.grad.untyped_storage().nbytes() == x.grad.nbytes, f"the gradient of {name} keeps memory of others"
        assert torch.equal(x, xs[rank]), f"{name} changed its input"
        assert torch.equal(grad, gs[rank]), f"{name} changed the gradient that came in"
    strided = drawn(8, 4).t().requires_grad_()  # and a gradient of which all elements are one
    all_gather(reduce_scatter(strided, tp, -1), tp, -1).sum().backward()
    close(strided.grad, torch.full((4, 8), float(size), dtype=torch.float64))


@SIZES
@BACKENDS
def test_collectives_are_what_they_say_forward_and_backward_and_leave_their_inputs_alone(size, backend):
    torch_world.run(pairs, size, backend=backend)


def uneven():
    tp = Grid(tp=2).tp
    with pytest.raises(ArgumentError, match=r"dimension 1 of \(4, 3\): expected a multiple of tp = 2, got 3"):
        scatter_to(torch.ones(4, 3), tp, 1)


def test_what_cannot_be_cut_evenly_is_refused():
    torch_world.run(uneven, 2)


# --- Layers -----------------------------------------------------------------------------------------------------------


class Norms(nn.Module):
    """A norm, a column and a row: what sequence parallelism splits, and what it enters and leaves."""

    def __init__(self, tp, sequence_parallel):
        super().__init__()
        self.norm = SplitLayerNorm(H, tp) if sequence_parallel else nn.LayerNorm(H)
        self.column = ColumnParallelLinear(H, 2 * H, tp, sequence_parallel=sequence_parallel)
        self.row = RowParallelLinear(2 * H, H, tp, sequence_parallel=sequence_parallel)

    def forward(self, x):
        return self.row(torch.sin(self.column(self.norm(x))))


LAYERS = {
    "norm, column, row": Norms,
    "MLP": lambda tp, sp: ParallelMLP(H, 4 * H, tp, sequence_parallel=sp),
    "attention": lambda tp, sp: ParallelAttention(H, 4, tp, sequence_parallel=sp),
    "attention with two key heads": lambda tp, sp: ParallelAttention(H, 8, tp, kv_heads=2, sequence_parallel=sp),
    "attention with one key head": lambda tp, sp: ParallelAttention(H, 4, tp, kv_heads=1, sequence_parallel=sp),
}


def stepped(layer, x, grad):
    """Return the output, the gradient of the input and those of all parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, {name: parameter.grad for name, parameter in layer.named_parameters()}


def layers(kind, sequence_parallel):
    torch.set_default_dtype(torch.float64)
    try:
        grid = Grid(tp=dist.get_world_size())
        one = Alone()
        torch.manual_seed(1)
        whole = LAYERS[kind](one, False)
        torch.manual_seed(1)
        mine = LAYERS[kind](grid.tp, sequence_parallel)
        x, grad = drawn(B, S, H, seed=1), drawn(B, S, H, seed=2)
        expected = stepped(whole, x, grad)
        local = [part(each, grid.tp, 1) if sequence_parallel else each for each in (x, grad)]
        y, x_grad, grads = stepped(mine, *local)
        if sequence_parallel:
            y, x_grad = joined(y, grid.tp, 1), joined(x_grad, grid.tp, 1)
        close(y, expected[0])
        close(x_grad, expected[1])
        full = to_full(grads, splits(mine), grid.tp)
        assert full.keys() == expected[2].keys()
        for name, each in full.items():
            close(each, expected[2][name])
    finally:
        torch.set_default_dtype(torch.float32)


class Alone:
    """The axis of a model in one process."""

    size, rank, name, ranks = 1, 0, "tp", (0,)

    def share(self, _, number):
        return number


@SIZES
@BACKENDS
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence-parallel"])
def test_layers_compute_what_one_process_does_with_all_gradients(size, backend, sequence_parallel):
    for kind in LAYERS:
        torch_world.run(layers, size, kind, sequence_parallel, backend=backend)


def embedded(vocabulary, sequence_parallel):
    tp = Grid(tp=dist.get_world_size()).tp
    whole = nn.Embedding(vocabulary, H, dtype=torch.float64)
    torch.manual_seed(1)
    mine = VocabParallelEmbedding(vocabulary, H, tp, sequence_parallel=sequence_parallel).double()
    torch.manual_seed(1)
    whole.load_state_dict({"weight": nn.Embedding(vocabulary, H).weight.double()})
    ids = torch.randint(vocabulary, (B, S), generator=torch.Generator().manual_seed(0))
    ids[0, :2] = torch.tensor([0, vocabulary - 1])
    y, expected, grad = mine(ids), whole(ids), drawn(B, S, H)
    expected.backward(grad)
    y.backward(part(grad, tp, 1) if sequence_parallel else grad)
    assert torch.equal(joined(y.detach(), tp, 1) if sequence_parallel else y, expected)
    full = to_full({"weight": mine.weight.grad}, splits(mine), tp)["weight"]
    assert torch.equal(full, whole.weight.grad)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence-parallel"])
def test_an_embedding_is_that_of_one_process_bit_for_bit_though_its_rows_do_not_divide(size, sequence_parallel):
    torch_world.run(embedded, size, 50_257, sequence_parallel)


def misfits():
    tp = Grid(tp=2).tp
    for make, words in (
        (lambda: ColumnParallelLinear(4, 3, tp), "outputs: expected a multiple of tp = 2, got 3"),
        (lambda: RowParallelLinear(3, 4, tp), "inputs: expected a multiple of tp = 2, got 3"),
        (lambda: ParallelAttention(12, 3, tp), "heads: expected a multiple of tp = 2, got 3"),
        (lambda: ParallelAttention(16, 3, tp), "hidden size: expected a multiple of the 3 heads, got 16"),
        (lambda: ParallelAttention(16, 4, tp, kv_heads=3), "heads: expected a multiple of the 3 key heads, got 4"),
        (
            lambda: ParallelAttention(12, 6, tp, kv_heads=3),
            "a multiple or a divisor of tp = 2, got 3",
        ),
        (lambda: ParallelAttention(16, 0, tp), "heads: expected an integer from 1"),
        (lambda: ParallelAttention(16, 4, tp, kv_heads=0), "key heads: expected an integer from 1"),
        (lambda: VocabParallelEmbedding(1, 4, tp), "more tokens than the 1 that 1 of 2 ranks have, got 1"),
        (lambda: VocabParallelEmbedding(5, 4, tp)(torch.tensor([[1, 5]])), "token ids: expected numbers from 0 to 4"),
    ):
        with pytest.raises(ArgumentError, match=words):
            make()


def test_layers_that_cannot_be_cut_are_refused_with_their_numbers():
    torch_world.run(misfits, 2)


# --- Random numbers ---------------------------------------------------------------------------------------------------


def dropped():
    grid = Grid(2, 2, 2)
    seed_ranks(grid, 5)
    x = torch.ones(64)
    return [nn.Dropout(0.5)(x).tolist(), SplitDropout(0.5, grid.tp)(x).tolist(), nn.Dropout(0.5)(x).tolist()]


def test_dropout_is_the_same_on_the_tensor_axis_where_it_must_be_and_different_elsewhere():
    before, inside, after = zip(*torch_world.run(dropped, 8), strict=True)
    for rank, other in itertools.combinations(range(8), 2):
        same = rank // 2 == other // 2  # neighbours on the tensor axis
        assert (before[rank] == before[other]) is same
        assert (after[rank] == after[other]) is same
        assert inside[rank] != inside[other]


def dropped_in_attention():
    """Return what the heads of this rank compute with dropout and without, and what the layer makes of the first."""
    grid = Grid(tp=2)
    attention = ParallelAttention(H, 2, grid.tp, dropout=0.5)
    for parameter in attention.parameters():
        nn.init.constant_(parameter, 0.1)  # all heads are one
    seen = []
    attention.out.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].tolist()))
    seed_ranks(grid, 0)
    x = drawn(B, S, H).float()
    y = attention(x)
    attention.eval()(x)
    return *seen, y.tolist()


def test_heads_on_different_ranks_drop_different_attention_weights():
    (one, whole, y), (other, also_whole, also_y) = torch_world.run(dropped_in_attention, 2)
    assert whole == also_whole
    assert one != other
    assert y == also_y


def again():
    grid = Grid(tp=2)
    seed_ranks(grid, 0)
    tp = grid.tp
    dropout = SplitDropout(0.5, tp)
    x = torch.ones(1000, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: dropout(x * 2), x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert set(y.tolist()) == {0.0, 4.0}
    with own(tp, x.device):
        inside = torch.rand(1)
    return float(inside), float(torch.rand(1))


def test_recomputed_activations_drop_the_same_numbers():
    (one, shared), (other, also_shared) = torch_world.run(again, 2)
    assert one != other
    assert shared == also_shared
