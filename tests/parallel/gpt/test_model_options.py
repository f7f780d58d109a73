"""Layers as torch's: names, copies, autocast, and the options with which GPT-2 and Llama fit."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from cases.pipelines import gpt_pipeline
from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import (
    ColumnParallelLinear,
    GPTConfig,
    Grid,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    SequenceParallelRMSNorm,
    VocabParallelEmbedding,
    gpt_loss,
    gpt_stages,
    make_schedule,
    rotary_embedding,
)
from ringcomm.parallel.collectives import all_gathered, local_slice
from ringcomm.parallel.model.verify import check_model

B, S, H, HEADS = 2, 6, 16, 4
LLAMA = {"activation": F.silu, "gated": True, "bias": False, "rms_norm": True, "rotary_base": 500.0, "inner": 24}
GPT2 = {"activation": partial(F.gelu, approximate="tanh")}


@torch_world.on(2)
def test_layers_have_the_attributes_and_the_text_of_torch():
    tp = Grid(tp=2).tp
    layers = [ColumnParallelLinear(4, 6, tp, bias=False), RowParallelLinear(4, 6, tp), VocabParallelEmbedding(8, 4, tp)]
    assert [repr(layer) for layer in layers] == [
        "ColumnParallelLinear(in_features=4, out_features=6, bias=False, tp=2)",
        "RowParallelLinear(in_features=4, out_features=6, bias=True, tp=2)",
        "VocabParallelEmbedding(8, 4, tp=2)",
    ]
    assert [(layer.in_features, layer.out_features) for layer in layers[:2]] == [(4, 6)] * 2
    assert (layers[2].num_embeddings, layers[2].embedding_dim) == (8, 4)


@torch_world.on(2)
def test_a_copied_model_computes_the_same_with_weights_of_its_own():
    grid = Grid(tp=2)
    config = GPTConfig(vocab_size=8, context=S, layers=1, hidden=H, heads=HEADS, sequence_parallel=True)
    (model,) = gpt_stages(config, grid)
    ids = torch.arange(S).expand(B, S)
    averaged = torch.optim.swa_utils.AveragedModel(model)  # deepcopies it
    twin = copy.deepcopy(model)
    expected = model(ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(ids), expected)
    assert torch.equal(averaged(ids), expected)
    assert twin.tp is model.tp


@torch_world.on(1, 2)
@torch_world.each("sequence_parallel", [False, True])
def test_layers_under_autocast_return_16_bits_as_those_of_torch(sequence_parallel):
    tp = Grid(tp=dist.get_world_size()).tp
    sp = {"sequence_parallel": sequence_parallel}
    tokens = S // tp.size if sequence_parallel else S
    x, inside = torch.randn(B, tokens, H), torch.randn(B, S, H // tp.size)
    layers = {
        "column": (ColumnParallelLinear(H, H, tp, **sp), x),
        "row": (RowParallelLinear(H, H, tp, **sp), inside),
        "MLP": (ParallelMLP(H, H, tp, **sp), x),
        "attention": (ParallelAttention(H, HEADS, tp, **sp), x),
    }
    with torch.autocast("cpu", torch.bfloat16):
        outputs = {name: layer(value) for name, (layer, value) in layers.items()}
        assert nn.Linear(H, H)(x).dtype == torch.bfloat16
    sum(y.float().sum() for y in outputs.values()).backward()
    assert {name: y.dtype for name, y in outputs.items()} == dict.fromkeys(layers, torch.bfloat16)
    for layer, _ in layers.values():
        assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


# --- GPT-2 and Llama --------------------------------------------------------------------------------------------------


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_rotary_positions_turn_pairs_as_complex_numbers():
    x = drawn(B, HEADS, S, 6)
    as_complex = torch.complex(x[..., :3], x[..., 3:])
    frequencies = torch.tensor([1.0, 100 ** (-1 / 3), 100 ** (-2 / 3)], dtype=torch.float64)
    turned = as_complex * torch.exp(1j * torch.arange(S)[:, None] * frequencies)
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(rotary_embedding(x, 100.0), expected, rtol=1e-12, atol=1e-12)
    half = rotary_embedding(x.bfloat16(), 100.0)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), expected, rtol=0.02, atol=0.05)


def attended(x, attention, mask, causal):
    """Compute attention from the weights of a layer on one rank, score by score."""

    def linear(layer):
        return F.linear(x, layer.weight, layer.bias)

    width = H // HEADS
    queries = linear(attention.query).view(B, S, HEADS, width)
    keys, values = linear(attention.key_value).view(B, S, -1, 2, width).unbind(3)
    turned = [rotary_embedding(each.transpose(1, 2), attention.rotary_base) for each in (queries, keys)]
    kv_heads = keys.shape[2]
    out = torch.zeros(B, S, HEADS, width, dtype=x.dtype)
    for head in range(HEADS):
        kv = head * kv_heads // HEADS
        scores = turned[0][:, head] @ turned[1][:, kv].transpose(1, 2) / width**0.5
        if causal:
            scores = scores + torch.full((S, S), float("-inf"), dtype=x.dtype).triu(1)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0], float("-inf"))
        out[:, :, head] = scores.softmax(-1) @ values[:, :, kv]
    return F.linear(out.flatten(2), attention.out.weight, attention.out.bias)


@torch_world.on(1, 2, 4)
@torch_world.each("kind", ["causal", "every token", "mask"])
@torch_world.each("kv_heads", [1, 2, 4])
def test_attention_with_masks_and_rotary_positions_equals_its_formula(kind, kv_heads):
    options = {"kv_heads": kv_heads, "rotary_base": 100.0, "bias": False, "causal": kind == "causal"}
    mask = torch.ones(B, 1, S, S, dtype=torch.bool)
    mask[1, :, :, 4:] = False  # padding
    mask = mask if kind == "mask" else None
    torch.set_default_dtype(torch.float64)
    try:
        results = []
        for tp in (Grid(tp=dist.get_world_size()).tp, Grid.alone().tp):
            torch.manual_seed(1)
            attention, x = ParallelAttention(H, HEADS, tp, **options), drawn(B, S, H).requires_grad_()
            y = attention(x, mask)
            y.backward(drawn(B, S, H, seed=1))
            results.append((y, x.grad))
        x = drawn(B, S, H).requires_grad_()
        expected = attended(x, attention, mask, kind == "causal")
        expected.backward(drawn(B, S, H, seed=1))
        for result in results:
            torch.testing.assert_close(result, (expected, x.grad), rtol=1e-10, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


@torch_world.on(2)
def test_heads_of_an_odd_size_cannot_be_rotated():
    with pytest.raises(ArgumentError, match="size of a head with rotary positions: expected an even number, got 3"):
        ParallelAttention(12, 4, Grid(tp=2).tp, rotary_base=100.0)


@torch_world.on(2)
def test_an_mlp_takes_its_activation_and_a_gate():
    tp, alone = Grid(tp=2).tp, Grid.alone().tp
    x = drawn(B, S, H)
    for activation, gated in ((F.silu, True), (torch.relu, False)):
        layers = []
        for axis in (tp, alone):
            torch.manual_seed(0)
            layers.append(ParallelMLP(H, 24, axis, activation=activation, gated=gated, bias=False).double())
        whole = layers[1]
        inner = activation(x @ (whole.gate if gated else whole.up).weight.T)
        expected = (inner * (x @ whole.up.weight.T) if gated else inner) @ whole.down.weight.T
        for layer in layers:
            torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@torch_world.on(2)
def test_a_sequence_parallel_rms_norm_equals_that_of_one_process():
    tp = Grid(tp=2).tp
    whole, norm = nn.RMSNorm(H, 0.1, dtype=torch.float64), SequenceParallelRMSNorm(H, tp, eps=0.1).double()
    x, grad = drawn(B, S, H), drawn(B, S, H, seed=1)
    expected = whole(x)
    expected.backward(grad)
    y = norm(local_slice(x, tp, 1))
    y.backward(local_slice(grad, tp, 1))
    torch.testing.assert_close(all_gathered(y.detach(), tp, 1), expected)
    torch.testing.assert_close(norm.weight.grad, whole.weight.grad)


@pytest.mark.parametrize("options", [GPT2, LLAMA], ids=["gpt-2", "llama"])
@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 2), (1, 2, 2)], ids=str)
def test_gpt2_and_llama_train_as_one_process(options, layout):
    torch_world.run(trained, layout[0] * layout[1] * layout[2], layout, options)


def trained(layout, options):
    grid, alone = Grid(*layout), Grid.alone()
    config = GPTConfig(
        vocab_size=11,
        context=S,
        layers=2,
        hidden=H,
        heads=HEADS,
        kv_heads=2,
        tied=False,
        sequence_parallel=True,
        **options,
    )
    chunks, pipe = gpt_pipeline(config, grid, make_schedule("1f1b", grid.pp.size, 2))
    whole = [chunk.double() for chunk in gpt_stages(config, alone)]
    names = [name for name, _ in whole[0].named_parameters()]
    assert any("positions" in name for name in names) is not bool(config.rotary_base)
    assert any("bias" in name for name in names) is config.bias
    ids = torch.randint(11, (4 * grid.dp.size, S + 1), generator=torch.Generator().manual_seed(0))
    mine = ids.chunk(grid.dp.size)[grid.dp.rank]
    loss = pipe.step(mine[:, :-1], mine[:, 1:])
    expected = gpt_loss(config, alone)(whole[0](ids[:, :-1]), ids[:, 1:])
    expected.backward()
    assert abs(float(loss - expected)) < 1e-10
    check_model(chunks, whole, grid, 1e-10)
