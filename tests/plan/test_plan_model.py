"""Parameters, FLOPs and legal layouts against the papers' formulas and against the model itself."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import GPTConfig, Grid, gpt_stages, make_schedule
from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.transformer import Transformer
from ringcomm.plan.price.memory import stage_parameters

SMALL = Transformer(layers=4, hidden=32, heads=4, vocab=100, seq=24)
GROUPED = replace(SMALL, kv_heads=1, ffn=48)  # one key for all queries; an MLP of another size


GATED = replace(SMALL, ffn=48, gated=True)
EXPERTS = replace(GATED, experts=4, top_k=2)


def config_of(model, **options):
    sizes = {name: getattr(model, name) for name in ("kv_heads", "gated", "experts", "top_k")} | {"inner": model.ffn}
    return GPTConfig(model.vocab, model.seq, model.layers, model.hidden, model.heads, **sizes, **options)


@torch_world.on(4)
@torch_world.each("model", [SMALL, GROUPED, replace(GROUPED, kv_heads=2), GATED, EXPERTS])
@torch_world.each(
    "layout",
    [
        ParallelLayout(pp=4),
        ParallelLayout(tp=2, pp=2, chunks=2),
        ParallelLayout(tp=2, pp=2, chunks=2, split_backward=True),
        ParallelLayout(tp=2, dp=2),
        ParallelLayout(tp=2, dp=2, ep=2),
    ],
)
def test_each_rank_has_as_many_parameters_as_planned(layout, model):
    grid = Grid(layout.dp, layout.tp, layout.pp, ep=layout.ep if model.experts else 1)
    layout = replace(layout, ep=grid.ep.size)
    schedule = make_schedule(layout.schedule, layout.pp, 4, layout.chunks)
    stages = gpt_stages(config_of(model), grid, schedule)
    unique = {id(each): each.numel() for stage in stages for each in stage.parameters()}
    assert sum(unique.values()) == stage_parameters(model, layout, grid.pp.rank)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "billions"),
    [(24, 2304, 24, 1.7), (36, 4096, 32, 7.5), (96, 12288, 96, 174.6), (128, 25600, 160, 1008.0)],
)
def test_parameters_and_flops_are_those_of_narayanan_et_al(layers, hidden, heads, billions):
    model = Transformer(layers, hidden, heads, 51200, 2048)
    l, h, V, s, B = layers, hidden, 51200, 2048, 8  # noqa: E741, N806 (as in the formulas)
    assert model.parameters - 2 * h == pytest.approx(12 * l * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * l * h)))
    assert round(model.parameters / 1e9, 1) == billions
    repeated = l * model.layer_flops(B)  # equation 3 counts every layer's forward twice
    equation_3 = 96 * B * s * l * h**2 * (1 + s / (6 * h) + V / (16 * l * h))
    assert model.step_flops(B) + repeated == pytest.approx(equation_3)
    assert model.step_flops(B) == pytest.approx(72 * B * l * s * h**2 * (1 + s / (6 * h) + V / (12 * l * h)))


@pytest.mark.parametrize(
    "model", [SMALL, replace(GROUPED, kv_heads=2), GATED, EXPERTS], ids=["plain", "2 keys", "gated", "experts"]
)
def test_a_model_has_the_flops_that_torch_counts(model):
    from torch.utils.flop_counter import FlopCounterMode

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (stage,) = gpt_stages(config_of(model), Grid())
        with (
            FlopCounterMode(display=False) as counter,
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            stage(torch.zeros(3, model.seq, dtype=torch.int64)).sum().backward()
        assert counter.get_total_flops() == model.step_flops(3)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"heads": 5}, r"heads: expected a divisor of hidden = 32 \(nearest: 4 or 8\), got 5"),
        ({"kv_heads": 3}, r"kv_heads: expected a divisor of heads = 4 \(nearest: 2 or 4\), got 3"),
        ({"layers": 0}, "layers: expected an integer from 1"),
        ({"experts": 4, "top_k": 5}, "top_k: expected at most experts = 4, got 5"),
        ({"experts": -1}, "experts: expected an integer from 0"),
        ({"layers": 10**12}, "layers: expected an integer from 1 to 1000000000"),
    ],
)
def test_an_impossible_model_is_refused(numbers, words):
    with pytest.raises(ArgumentError, match=words):
        replace(SMALL, **numbers)


LEGAL = ParallelLayout(tp=2, pp=2, dp=2, cp=1, micro_batch=2, chunks=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp": 3, "gpus": 12}, r"tp: expected a divisor of heads = 4 \(nearest: 2 or 4\), got 3"),
        ({"pp": 3, "gpus": 12}, r"pp: expected a divisor of layers = 4 \(nearest: 2 or 4\), got 3"),
        ({"dp": 3, "gpus": 12}, r"dp: expected a divisor of batch = 16 \(nearest: 2 or 4\), got 3"),
        ({"cp": 5, "gpus": 40}, r"cp: expected a divisor of seq/2 = 12 \(nearest: 4 or 6\), got 5"),
        ({"chunks": 3}, r"chunks: expected a divisor of layers/pp = 2 \(nearest: 2\), got 3"),
        ({"micro_batch": 3}, r"micro_batch: expected a divisor of batch/dp = 8 \(nearest: 2 or 4\), got 3"),
        ({"micro_batch": 8}, "micro-batches of interleaved: expected a multiple of pp = 2, got 1"),
        ({"recompute": "ful"}, "unknown recompute 'ful'; did you mean 'full'"),
        ({"zero": 4}, "unknown zero 4"),
        ({"zero": 3}, "zero 3: expected tp 1, cp 1, ep 1 and chunks 1, got tp 2, cp 1, ep 1 and chunks 2"),
        ({"split_backward": True, "zero": 3}, "zero with zbv, which splits backward: expected at most 2, got 3"),
        ({"gpus": 16}, "gpus: expected tp 2 · pp 2 · dp 2 · cp 1 = 8, got 16"),
        ({"tp": 0}, "tp: expected an integer from 1"),
        ({"tp": 1, "gpus": 4}, "sequence_parallel: expected tp > 1, got tp 1"),
        ({"dp": 1, "zero": 1, "gpus": 4}, "zero 1: expected dp > 1 or cp > 1, got dp 1 and cp 1"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_nearest_possible_values(change, words):
    LEGAL.check(SMALL, 16, 8)
    gpus = change.pop("gpus", 8)
    with pytest.raises(ArgumentError, match=words):
        replace(LEGAL, **change).check(SMALL, 16, gpus)


def test_experts_are_divided_among_replicas():
    layout = ParallelLayout(dp=4, ep=2)
    layout.check(EXPERTS, 16, 4)
    for change, model, words in (
        ({"ep": 3}, EXPERTS, r"ep: expected a divisor of dp = 4 \(nearest: 2 or 4\), got 3"),
        ({"ep": 4}, replace(EXPERTS, experts=6), r"ep: expected a divisor of experts = 6 \(nearest: 3 or 6\), got 4"),
        ({"zero": 3}, EXPERTS, "zero 3: expected tp 1, cp 1, ep 1 and chunks 1, got tp 1, cp 1, ep 2 and chunks 1"),
        ({}, SMALL, "ep: expected 1 without experts, got 2"),
    ):
        with pytest.raises(ArgumentError, match=words):
            replace(layout, **change).check(model, 16, 4)
    with pytest.raises(ArgumentError, match=r"tp: expected a divisor of ffn = 50 \(nearest: 2 or 5\), got 4"):
        ParallelLayout(tp=4).check(replace(SMALL, ffn=50), 16, 4)


def test_a_token_passes_the_parameters_of_its_experts():
    mixtral = Transformer(32, 4096, 32, 32000, 4096, kv_heads=8, ffn=14336, gated=True, experts=8, top_k=2)
    # Jiang et al., Mixtral of Experts (arXiv 2401.04088): 47 B and 13 B, with the output layer that is tied here.
    untied = mixtral.vocab * mixtral.hidden
    assert round((mixtral.parameters + untied) / 1e9) == 47
    assert round((mixtral.active_parameters + untied) / 1e9) == 13


def test_a_sequence_is_divided_evenly():
    layout = ParallelLayout(tp=4, sequence_parallel=True)
    layout.check(SMALL, 1, 4)
    with pytest.raises(ArgumentError, match=r"tp: expected a divisor of seq/cp = 26 \(nearest: 2 or 13\), got 4"):
        layout.check(replace(SMALL, seq=26), 1, 4)
    with pytest.raises(ArgumentError, match="cp: expected 1 for an odd seq of 25, got 5"):
        ParallelLayout(cp=5).check(replace(SMALL, seq=25), 1, 5)
