"""A GPT whose sequences are split over cp equals the GPT of one process, and ranks that fail leave no other waiting."""

import re
import time
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

from cases.pipelines import gpt_pipeline
from harness import torch_world
from harness.failures import PROMPT, raised
from ringcomm import Aborted, ArgumentError
from ringcomm.parallel import (
    GPTConfig,
    Grid,
    ParallelAttention,
    gpt_loss,
    gpt_stages,
    make_schedule,
    rotary_embedding,
    seed_ranks,
)
from ringcomm.parallel.context import ring, ulysses
from ringcomm.parallel.context.sequence import sequence_positions, split_sequence
from ringcomm.parallel.model.verify import check_model

MICRO_BATCHES, ROWS = 2, 2  # of a replica; sequences of a micro-batch
LLAMA = {"activation": F.silu, "gated": True, "bias": False, "rms_norm": True, "rotary_base": 500.0, "tied": False}


def config_for(grid, **options):
    heads = 2 * grid.tp.size * grid.cp.size
    context = 2 * grid.cp.size * max(2, grid.tp.size)
    return GPTConfig(vocab_size=11, context=context, layers=2, hidden=4 * heads, heads=heads, **options)


def batch_of(config, grid):
    """Return the inputs and targets of all replicas, whole."""
    rows = grid.dp.size * MICRO_BATCHES * ROWS
    ids = torch.randint(11, (rows, config.context + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def part_of(x, grid):
    return split_sequence(x.chunk(grid.dp.size)[grid.dp.rank], grid.cp)


def trained(sizes, options):
    grid, alone = Grid(**sizes), Grid.alone()
    config = config_for(grid, **options)
    chunks, pipeline = gpt_pipeline(config, grid, make_schedule("1f1b", grid.pp.size, MICRO_BATCHES))
    whole = [stage.double() for stage in gpt_stages(config, alone)]
    inputs, targets = batch_of(config, grid)
    loss = pipeline.step(part_of(inputs, grid), part_of(targets, grid))
    expected = gpt_loss(config, alone)(whole[0](inputs), targets)
    expected.backward()
    assert abs(float(loss - expected)) < 1e-10
    check_model(chunks, whole, grid, 1e-10)
    evaluated = pipeline.evaluate(part_of(inputs, grid), part_of(targets, grid))
    assert abs(float(evaluated - expected)) < 1e-10


LAYOUTS = [{"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}, {"cp": 2, "dp": 2}]
EIGHT = [{"cp": 2, "tp": 2, "dp": 2}, {"cp": 2, "tp": 2, "pp": 2}, {"cp": 4, "pp": 2}, {"cp": 8}, {"cp": 4, "tp": 2}]
OPTIONS = {
    "ring": {},
    "ulysses": {"context_parallel": "ulysses", "kv_heads": 1},
    "ring, sequence parallel, rotary": {"sequence_parallel": True, **LLAMA},
    "ulysses, sequence parallel, recomputed": {
        "context_parallel": "ulysses",
        "sequence_parallel": True,
        "recompute": True,
    },
}


# Every attention on every layout; the other options where the code of a layout differs for them.
@pytest.mark.parametrize(
    ("sizes", "option"),
    [
        *((sizes, option) for sizes in LAYOUTS for option in ("ring", "ulysses")),
        *(({"cp": 2, "tp": 2}, option) for option in OPTIONS if "sequence parallel" in option),
        ({"cp": 4}, "ring, sequence parallel, rotary"),
        ({"cp": 2, "pp": 2}, "ulysses, sequence parallel, recomputed"),
        *(pytest.param(sizes, option, marks=pytest.mark.exhaustive) for sizes in EIGHT for option in OPTIONS),
    ],
    ids=str,
)
def test_a_gpt_with_split_sequences_trains_as_one_process(sizes, option):
    torch_world.run(trained, torch.Size(sizes.values()).numel(), sizes, OPTIONS[option])


def test_a_gpt_on_sequence_tensor_and_data_axes_together_trains_as_one_process():
    torch_world.run(trained, 8, {"cp": 2, "tp": 2, "dp": 2}, {"sequence_parallel": True, "kv_heads": 2, **LLAMA})


def test_a_gpt_recomputes_a_ring_and_trains_as_one_process_on_gloo():
    torch_world.run(trained, 2, {"cp": 2}, {"recompute": True}, backend="gloo")


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@torch_world.on(2)
def test_a_gpt_drops_activations_that_differ_by_rank_or_refuses(attention):
    grid = Grid(cp=2)
    config = config_for(grid, dropout=0.5, context_parallel=attention)
    if attention == "ring":
        with pytest.raises(ArgumentError, match="weights in a ring: expected 0, or context_parallel='ulysses', got 0"):
            gpt_stages(config, grid)
        return
    chunks, pipeline = gpt_pipeline(config, grid, make_schedule("1f1b", grid.pp.size, MICRO_BATCHES))
    seed_ranks(grid, 0)
    seen = []
    chunks[0].dropout.register_forward_hook(lambda *seen_by_hook: seen.append(seen_by_hook[-1] == 0))
    inputs, targets = batch_of(config, grid)
    pipeline.step(part_of(inputs, grid), part_of(targets, grid))
    masks = [torch.empty_like(seen[0]) for _ in range(2)]
    dist.all_gather(masks, seen[0])
    assert masks[0].any()
    assert not torch.equal(*masks)


@torch_world.on(2)
def test_sequences_masks_and_names_that_do_not_fit_are_refused_on_all_ranks():
    grid = Grid(cp=2)
    config = config_for(grid)
    (model,) = gpt_stages(config, grid)
    with pytest.raises(ArgumentError, match="length of a sequence: expected at most 8, got 10"):
        model(torch.zeros(1, 5, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="length of a sequence: expected a multiple of 2 cp = 4, got 6"):
        model(torch.zeros(1, 3, dtype=torch.int64))
    attention = ParallelAttention(8, 2, grid.tp, cp=grid.cp)
    with pytest.raises(ArgumentError, match="mask of sequences split over cp: expected None, got one"):
        attention(torch.zeros(1, 4, 8), torch.ones(8, 8, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="unknown context_parallel 'rings'; did you mean 'ring'"):
        gpt_stages(config_for(grid, context_parallel="rings"), grid)
    uneven = ParallelAttention(12, 3, grid.tp, cp=grid.cp, context_parallel="ulysses")
    with pytest.raises(ArgumentError, match="heads of the queries: expected a multiple of cp = 2, got 3"):
        uneven(torch.zeros(1, 4, 12))
    model(torch.zeros(1, 4, dtype=torch.int64))  # nothing was sent


def test_positions_of_a_part_rotate_it_as_in_the_whole_sequence():
    x = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    for rank in range(2):
        axis = type("Axis", (), {"size": 2, "rank": rank, "name": "cp"})
        positions = sequence_positions(8, axis)
        found = rotary_embedding(x[..., positions, :], 100.0, positions)
        assert torch.equal(found, rotary_embedding(x, 100.0)[..., positions, :])


# --- Ranks that fail --------------------------------------------------------------------------------------------------


def failed(attention, name):
    """Fail on rank 1, the second time a rank attends to a block, or exchanges heads, in forward or backward."""
    grid = Grid(cp=dist.get_world_size())
    config = config_for(grid, context_parallel=attention)
    _, pipeline = gpt_pipeline(config, grid, make_schedule("1f1b", grid.pp.size, MICRO_BATCHES))
    batch = [part_of(each, grid) for each in batch_of(config, grid)]
    pipeline.step(*batch)
    module = {"ring": ring, "ulysses": ulysses}[attention]
    function, calls = getattr(module, name), []

    def fails(*arguments):
        calls.append(name)
        if grid.cp.rank == 1 and len(calls) == 2:
            raise MemoryError("no memory for a block")
        return function(*arguments)

    started = time.monotonic()
    with patch.object(module, name, fails):
        error = raised((MemoryError, Aborted), partial(pipeline.step, *batch))
    seconds = time.monotonic() - started
    dist.barrier()  # every process lives on
    return type(error).__name__, str(error), seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "name"), [("ring", "attend"), ("ring", "attend_backward"), ("ulysses", "all_to_all")]
)
def test_a_rank_that_fails_inside_leaves_no_other_waiting(attention, name):
    answers = torch_world.run(failed, 4, attention, name)
    assert [kind for kind, _, _ in answers] == ["Aborted", "MemoryError", "Aborted", "Aborted"]
    for kind, text, seconds in answers:
        assert seconds < PROMPT
        words = "global rank 1 ended .*: MemoryError: no memory for a block"
        assert kind == "MemoryError" or re.search(words, text)
