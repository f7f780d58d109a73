"""Tensor parallelism compared with one process, in float64: outputs, gradients of inputs and of all parameters."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import (
    ColumnParallelLinear,
    Grid,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    SequenceParallelDropout,
    SequenceParallelLayerNorm,
    VocabParallelEmbedding,
    VocabParallelHead,
    all_gather,
    all_to_all,
    collect_shard_specs,
    copy_to,
    full_tensors,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
    seed_ranks,
    vocab_parallel_cross_entropy,
)
from ringcomm.parallel.collectives import all_gathered, local_slice

B, S, H = 2, 8, 16


def close(got, expected):
    assert got.shape == expected.shape
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12), float((got - expected).abs().max())


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- Differentiable collectives ---------------------------------------------------------------------------------------

# The function; its output on rank r for the inputs xs of the ranks; its gradient on rank r for the gradients gs.
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
    "all_to_all": (
        lambda x, tp, dim: all_to_all(x, tp, dim, 1 - abs(dim)),
        lambda xs, r, dim: torch.cat([slice_of(x, r, dim) for x in xs], 1 - abs(dim)),
        lambda gs, r, dim: torch.cat([slice_of(g, r, 1 - abs(dim)) for g in gs], dim),
    ),
}


def slice_of(x, rank, dim):
    return x.chunk(dist.get_world_size(), dim)[rank]


@torch_world.on(1, 2, 4, backends=torch_world.BACKENDS)
def test_differentiable_collectives_are_correct_in_both_directions_and_leave_their_inputs_unchanged():
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
        assert x.grad.untyped_storage().nbytes() == x.grad.nbytes, f"the gradient of {name} keeps more memory alive"
        assert torch.equal(x, xs[rank]), f"{name} changed its input"
        assert torch.equal(grad, gs[rank]), f"{name} changed the incoming gradient"
    strided = drawn(8, 4).t().requires_grad_()  # and a gradient whose elements share memory
    all_gather(reduce_scatter(strided, tp, -1), tp, -1).sum().backward()
    close(strided.grad, torch.full((4, 8), float(size), dtype=torch.float64))


# --- Layers -----------------------------------------------------------------------------------------------------------


class Norms(nn.Module):
    """A norm, a column-parallel and a row-parallel layer."""

    def __init__(self, tp, sequence_parallel):
        super().__init__()
        self.norm = SequenceParallelLayerNorm(H, tp) if sequence_parallel else nn.LayerNorm(H)
        self.column = ColumnParallelLinear(H, 2 * H, tp, sequence_parallel=sequence_parallel)
        self.row = RowParallelLinear(2 * H, H, tp, sequence_parallel=sequence_parallel)

    def forward(self, x):
        return self.row(torch.sin(self.column(self.norm(x))))


LAYERS = {
    "norm, column, row": Norms,
    "MLP": lambda tp, sp: ParallelMLP(H, 4 * H, tp, sequence_parallel=sp),
    "attention": lambda tp, sp: ParallelAttention(H, 4, tp, sequence_parallel=sp),
    "attention with two kv_heads": lambda tp, sp: ParallelAttention(H, 8, tp, kv_heads=2, sequence_parallel=sp),
    "attention with one kv_head": lambda tp, sp: ParallelAttention(H, 4, tp, kv_heads=1, sequence_parallel=sp),
}


def stepped(layer, x, grad):
    """Return the output, the gradient of the input and those of all parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, {name: parameter.grad for name, parameter in layer.named_parameters()}


@torch_world.on(1, 2, 4, backends=torch_world.BACKENDS)
@torch_world.each("sequence_parallel", [False, True])
@torch_world.each("kind", LAYERS)
def test_layers_equal_those_of_one_process_with_all_gradients(kind, sequence_parallel):
    torch.set_default_dtype(torch.float64)
    try:
        grid = Grid(tp=dist.get_world_size())
        one = Grid.alone().tp
        torch.manual_seed(1)
        whole = LAYERS[kind](one, False)
        torch.manual_seed(1)
        mine = LAYERS[kind](grid.tp, sequence_parallel)
        x, grad = drawn(B, S, H, seed=1), drawn(B, S, H, seed=2)
        expected = stepped(whole, x, grad)
        local = [local_slice(each, grid.tp, 1) if sequence_parallel else each for each in (x, grad)]
        y, x_grad, grads = stepped(mine, *local)
        if sequence_parallel:
            y, x_grad = all_gathered(y, grid.tp, 1), all_gathered(x_grad, grid.tp, 1)
        close(y, expected[0])
        close(x_grad, expected[1])
        full = full_tensors(grads, collect_shard_specs(mine), grid.tp)
        assert full.keys() == expected[2].keys()
        for name, each in full.items():
            close(each, expected[2][name])
    finally:
        torch.set_default_dtype(torch.float32)


@torch_world.on(2, 4)
@torch_world.each("sequence_parallel", [False, True])
def test_a_padded_embedding_equals_that_of_one_process_bit_for_bit(sequence_parallel):
    vocab_size = 50_257
    tp = Grid(tp=dist.get_world_size()).tp
    whole = nn.Embedding(vocab_size, H, dtype=torch.float64)
    torch.manual_seed(1)
    mine = VocabParallelEmbedding(vocab_size, H, tp, sequence_parallel=sequence_parallel).double()
    torch.manual_seed(1)
    whole.load_state_dict({"weight": nn.Embedding(vocab_size, H).weight.double()})
    ids = torch.randint(vocab_size, (B, S), generator=torch.Generator().manual_seed(0))
    ids[0, :2] = torch.tensor([0, vocab_size - 1])
    y, expected, grad = mine(ids), whole(ids), drawn(B, S, H)
    expected.backward(grad)
    y.backward(local_slice(grad, tp, 1) if sequence_parallel else grad)
    assert torch.equal(all_gathered(y.detach(), tp, 1) if sequence_parallel else y, expected)
    full = full_tensors({"weight": mine.weight.grad}, collect_shard_specs(mine), tp)["weight"]
    assert torch.equal(full, whole.weight.grad)


@torch_world.on(2, 4)
@torch_world.each("bias", [False, True])
@torch_world.each("sequence_parallel", [False, True])
def test_a_padded_head_equals_that_of_one_process(sequence_parallel, bias):
    vocab_size = 4 * dist.get_world_size() - 1
    tp = Grid(tp=dist.get_world_size()).tp
    torch.manual_seed(1)
    mine = VocabParallelHead(H, vocab_size, tp, bias=bias, sequence_parallel=sequence_parallel).double()
    torch.manual_seed(1)
    whole = nn.Linear(H, vocab_size, bias).double()
    x, targets = drawn(B, S, H), torch.arange(B * S).view(B, S) % vocab_size
    mine_x, whole_x = (each.clone().requires_grad_() for each in (local_slice(x, tp, 1) if sequence_parallel else x, x))
    loss = vocab_parallel_cross_entropy(mine(mine_x), targets, tp, vocab_size=vocab_size)
    expected = nn.functional.cross_entropy(whole(whole_x).flatten(0, 1), targets.flatten())
    close(loss, expected)
    for each in (loss, expected):
        each.backward()
    close(mine_x.grad, local_slice(whole_x.grad, tp, 1) if sequence_parallel else whole_x.grad)
    grads = {name: parameter.grad for name, parameter in mine.named_parameters()}
    for name, grad in full_tensors(grads, collect_shard_specs(mine), tp).items():
        close(grad, getattr(whole, name).grad)


@torch_world.on(2)
def test_layers_and_tensors_that_cannot_be_divided_are_refused():
    tp = Grid(tp=2).tp
    for make, words in (
        (lambda: ColumnParallelLinear(4, 3, tp), "out_features: expected a multiple of tp = 2, got 3"),
        (lambda: RowParallelLinear(3, 4, tp), "in_features: expected a multiple of tp = 2, got 3"),
        (lambda: ParallelAttention(12, 3, tp), r"tp: expected a divisor of heads = 3 \(nearest: 1 or 3\), got 2"),
        (lambda: ParallelAttention(16, 3, tp), "hidden size: expected a multiple of the 3 heads, got 16"),
        (lambda: ParallelAttention(16, 4, tp, kv_heads=3), "heads: expected a multiple of the 3 kv_heads, got 4"),
        (
            lambda: ParallelAttention(12, 6, tp, kv_heads=3),
            "tp: expected a multiple or a divisor of kv_heads = 3, got 2",
        ),
        (lambda: ParallelAttention(16, 0, tp), "heads: expected an integer from 1"),
        (lambda: ParallelAttention(16, 4, tp, kv_heads=0), "kv_heads: expected an integer from 1"),
        (lambda: VocabParallelEmbedding(1, 4, tp), "num_embeddings: expected 2 or more, a row for each of 2 ranks"),
        (lambda: VocabParallelHead(4, 1, tp), "vocab_size: expected 2 or more, a row for each of 2 ranks, got 1"),
        (lambda: VocabParallelEmbedding(5, 4, tp)(torch.tensor([[1, 5]])), "token ids: expected numbers from 0 to 4"),
        (lambda: scatter_to(torch.ones(4, 3), tp, 1), r"dimension 1 of \(4, 3\): expected a multiple of tp = 2, got 3"),
    ):
        with pytest.raises(ArgumentError, match=words):
            make()


# --- Random numbers ---------------------------------------------------------------------------------------------------


def dropped():
    grid = Grid(2, 2, 2)
    seed_ranks(grid, 5)
    x = torch.ones(64)
    return [nn.Dropout(0.5)(x).tolist(), SequenceParallelDropout(0.5, grid.tp)(x).tolist(), nn.Dropout(0.5)(x).tolist()]


def test_dropout_is_equal_on_the_tensor_axis_outside_the_sharded_region_only():
    before, inside, after = zip(*torch_world.run(dropped, 8), strict=True)
    for rank, other in itertools.combinations(range(8), 2):
        same = rank // 2 == other // 2  # neighbors on the tensor axis
        assert (before[rank] == before[other]) is same
        assert (after[rank] == after[other]) is same
        assert inside[rank] != inside[other]


def dropped_in_attention():
    """Return the outputs of this rank's heads with and without dropout, and that of the layer with dropout."""
    grid = Grid(tp=2)
    attention = ParallelAttention(H, 2, grid.tp, dropout=0.5)
    for parameter in attention.parameters():
        nn.init.constant_(parameter, 0.1)  # all heads are equal
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
