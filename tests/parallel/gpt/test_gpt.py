"""A GPT on a grid equals the GPT of one process: loss, every gradient and every weight after each step."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import harness
from cases.small_gpt import MICRO_BATCHES, batch_of, compared, config_for, layouts, stepped
from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import Grid, gpt_loss, gpt_stages, make_schedule, seed_ranks
from ringcomm.parallel.model.verify import KINDS, check_model, full_values

OPTIONS = {
    "plain": {},
    "sequence-parallel": {"sequence_parallel": True},
    "grouped-query": {"grouped": True, "tied": False},
    "recomputed": {"recompute": True, "sequence_parallel": True, "kv_heads": 1},
}


def same_everywhere(dp, tp, pp, schedule, option, steps=3, dtype=torch.float64, tolerance=1e-10, **where):
    arguments = (dp, tp, pp, schedule, OPTIONS[option], steps, dtype, tolerance)
    assert len(set(torch_world.run(compared, dp * tp * pp, *arguments, **where))) == 1


# Each pair of axes; a stage that is neither the first nor the last; more than two shards.
@pytest.mark.parametrize(
    ("layout", "option"),
    [(layout, "plain") for layout in [(1, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]]
    # Without tensor parallelism there is nothing to shard along the sequence.
    + [(layout, "sequence-parallel") for layout in [(2, 1, 2), (2, 2, 1), (1, 2, 2), (1, 4, 1)]],
    ids=str,
)
def test_every_layout_trains_as_one_process(layout, option):
    """The default model ties its embeddings, whose copies are compared bit for bit."""
    same_everywhere(*layout, "1f1b", option)


@pytest.mark.parametrize(
    ("layout", "option"), [((2, 2, 1), "grouped-query"), ((1, 2, 2), "recomputed"), ((1, 4, 1), "recomputed")], ids=str
)
def test_fewer_kv_heads_and_recomputation_train_as_one_process(layout, option):
    same_everywhere(*layout, "gpipe", option)


@pytest.mark.parametrize("layout", [(1, 2, 2), (2, 1, 1)], ids=str)
def test_interleaved_stages_train_as_one_process_also_where_one_rank_has_both_ends(layout):
    same_everywhere(*layout, "interleaved", "sequence-parallel")


@pytest.mark.parametrize(
    ("layout", "schedule", "option", "backend"),
    [((2, 2, 1), "1f1b", "plain", "ringcomm"), ((1, 2, 2), "interleaved", "sequence-parallel", "gloo")],
    ids=str,
)
def test_float32_trains_as_one_process_within_1e_5(layout, schedule, option, backend):
    same_everywhere(*layout, schedule, option, dtype=torch.float32, tolerance=1e-5, backend=backend)


every_layout = pytest.mark.parametrize("layout", [each for size in range(1, 9) for each in layouts(size)], ids=str)


@pytest.mark.exhaustive
@pytest.mark.timeout(150)
@every_layout
@pytest.mark.parametrize("backend", torch_world.BACKENDS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_every_layout_of_up_to_eight_ranks_and_every_schedule(layout, schedule, option, backend, monkeypatch):
    monkeypatch.setattr(harness, "JOB", 120.0)  # 20 steps on Gloo with tp = 8 take a minute on two cores
    if schedule == "interleaved" and MICRO_BATCHES % layout[-1]:
        pytest.skip("an interleaved schedule needs a multiple of pp micro-batches")
    same_everywhere(*layout, schedule, option, steps=20, backend=backend)


# --- Refusals, and check_model ----------------------------------------------------------------------------------------


@torch_world.on(2)
def test_layers_and_sequences_that_cannot_be_divided_are_refused():
    grid = Grid(tp=2)
    with pytest.raises(ArgumentError, match=r"chunks: expected a divisor of layers/pp = 2 \(nearest: 2\), got 3"):
        gpt_stages(config_for(2, 1), grid, make_schedule("interleaved", 1, 1, 3))
    (model,) = gpt_stages(config_for(2, 1, sequence_parallel=True), grid)
    with pytest.raises(ArgumentError, match="length of a sequence: expected at most 8, got 9"):
        model(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="rank's part of a sequence: expected a multiple of tp = 2, got 7"):
        model(torch.zeros(1, 7, dtype=torch.int64))


@torch_world.on(2)
@torch_world.each("kind", KINDS)
@torch_world.each("name", ["blocks.1.mlp.up.weight", "blocks.0.attention.query.weight"])
def test_check_model_names_a_value_that_is_slightly_off_on_one_rank(kind, name):
    grid, alone = Grid(tp=2), Grid.alone()
    config = config_for(2, 1)
    chunks, whole = gpt_stages(config, grid), gpt_stages(config, alone)
    with pytest.raises(AssertionError, match=r"no gradient of embedding\.weight"):
        full_values("gradient", chunks, grid)
    inputs, targets = batch_of(config, grid, 0)
    for each, layout in ((chunks, grid), (whole, alone)):
        stepped(each, gpt_loss(config, layout), inputs, targets)
    check_model(chunks, whole, grid, 1e-5)
    if dist.get_rank() == 1:
        values = KINDS[kind](chunks[0].get_parameter(name)).view(-1)
        values[values.abs().argmax()] *= 1.05
    with pytest.raises(AssertionError, match=re.escape(f"{kind} of {name}: off by")):
        check_model(chunks, whole, grid, 1e-5)


# --- Recomputation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recompute", "times"), [(False, 1), (True, 2)])
@torch_world.on(1)
def test_recomputation_repeats_each_forward_in_backward_but_not_in_evaluation(recompute, times):
    grid = Grid.alone()
    config = config_for(1, 1, recompute=recompute)
    (model,) = gpt_stages(config, grid)
    counts = dict.fromkeys(model.blocks, 0)

    def count(*_, name):
        counts[name] += 1

    for name, block in model.blocks.items():
        block.register_forward_pre_hook(partial(count, name=name))
    inputs, targets = batch_of(config, grid, 0)
    stepped([model], gpt_loss(config, grid), inputs, targets)
    assert list(counts.values()) == [times * MICRO_BATCHES] * 2
    model.eval()(inputs)
    assert list(counts.values()) == [times * MICRO_BATCHES + 1] * 2


# --- Dropout ----------------------------------------------------------------------------------------------------------


def dropped(sequence_parallel, recompute):
    grid = Grid(tp=2)
    config = config_for(2, 1, dropout=0.3, sequence_parallel=sequence_parallel, recompute=recompute)
    (model,) = gpt_stages(config, grid)
    model.double()
    seed_ranks(grid, 1)
    inputs, targets = batch_of(config, grid, 0)
    loss = stepped([model], gpt_loss(config, grid), inputs, targets)
    grads = full_values("gradient", [model], grid)
    return float(loss), {name: grad.tolist() for name, grad in grads.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence-parallel"])
def test_tensor_parallel_ranks_agree_under_dropout_and_recomputation_repeats_it(sequence_parallel):
    kept = torch_world.run(dropped, 2, sequence_parallel, False)
    recomputed = torch_world.run(dropped, 2, sequence_parallel, True)
    assert kept[0] == kept[1] == recomputed[0] == recomputed[1]


def places_dropped(sequence_parallel):
    """Return the zeros of each dropout of the model."""
    grid = Grid(tp=2)
    config = config_for(2, 1, dropout=0.3, sequence_parallel=sequence_parallel)
    (model,) = gpt_stages(config, grid)
    places = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda *seen: places.append((seen[-1] == 0).tolist()))
    seed_ranks(grid, 1)
    model(batch_of(config, grid, 0)[0])
    return places


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence-parallel"])
def test_dropout_is_equal_for_replicated_activations_and_differs_for_sharded_ones(sequence_parallel):
    one, other = torch_world.run(places_dropped, 2, sequence_parallel)
    assert len(one) == 1 + 2 * 2  # embedding; two branches in each of two layers
    for mine, theirs in zip(one, other, strict=True):
        assert (mine == theirs) is not sequence_parallel
