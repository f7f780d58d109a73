"""Invalid pipelines, stages whose outputs cannot be sent, and ranks that fail or die."""

import os
import re
import signal
import time
from functools import partial
from itertools import count

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

import harness
from cases.pipelines import MICRO_BATCHES, ROWS, batch, layers, pipeline
from harness import torch_world
from harness.failures import PROMPT, outcomes, raised
from ringcomm import Aborted, ArgumentError, PeerLost
from ringcomm.parallel import (
    DataParallel,
    GPTConfig,
    Grid,
    Pipeline,
    ShardedOptimizer,
    gpt_loss,
    gpt_stages,
    gpt_tied_weights,
)
from ringcomm.pipelining.schedule import make_schedule


@torch_world.on(2)
def test_tied_weights_that_nothing_sums_are_refused_on_all_ranks():
    grid = Grid(pp=2)
    config = GPTConfig(vocab_size=8, context=4, layers=2, hidden=8, heads=2)
    chunks, schedule, loss_fn = gpt_stages(config, grid), make_schedule("1f1b", 2, 2), gpt_loss(config, grid)
    tied, sgd = gpt_tied_weights(chunks, grid), partial(torch.optim.SGD, lr=0.1)
    construct = partial(Pipeline, grid, chunks, schedule, loss_fn)
    ids = torch.zeros(2, 4, dtype=torch.int64)

    def refused(**options):
        pipe = construct(**options)
        assert pipe.evaluate(ids, ids).isfinite()  # which needs no sums of gradients
        first, second = (raised(ArgumentError, lambda: pipe.step(ids, ids)) for _ in range(2))
        assert first is not second  # an exception keeps the frames of each step that has raised it
        return str(second)

    texts = [refused()]
    zero = ShardedOptimizer(chunks, grid, sgd)
    texts += [refused(data_parallel=zero, tied=each) for each in ((), tied)]
    zero.close()
    construct(tied=tied)
    construct(data_parallel=ShardedOptimizer(chunks, grid, sgd, tied=tied))
    for text, taker, ranks in zip(texts, ("Pipeline", *["ShardedOptimizer"] * 2), ((1,), (1,), (0, 1)), strict=True):
        relayed = "" if grid.pp.rank in ranks else "rank 1: "
        assert text == f"{relayed}tied of the {taker}: expected all copies, as of gpt_tied_weights, got 1 fewer"


@torch_world.on(2)
def test_schedules_and_batches_of_other_sizes_are_refused():
    grid = Grid(pp=2)
    stage = layers(2)[grid.pp.rank]
    errors = [
        raised(ArgumentError, lambda: Pipeline(grid, [stage], make_schedule("1f1b", 4, 8), F.mse_loss)),
        raised(ArgumentError, lambda: Pipeline(grid, [stage], make_schedule("interleaved", 2, 4, 2), F.mse_loss)),
    ]
    pipe = Pipeline(grid, [stage], make_schedule("1f1b", 2, 4), F.mse_loss)
    errors.append(raised(ArgumentError, lambda: pipe.step(*batch(6))))
    errors.append(raised(ArgumentError, lambda: pipe.step(batch(4)[0], torch.tensor(1.0))))
    errors.append(raised(ArgumentError, lambda: pipe.step(batch(8)[0], batch(4)[1])))
    errors.append(raised(ArgumentError, lambda: pipe.step(batch(4)[0], None)))
    errors.append(raised(ArgumentError, lambda: pipe.evaluate([1, 2], batch(4)[1])))
    with torch.no_grad():
        errors.append(raised(ArgumentError, lambda: pipe.step(*batch(4))))
    pipe.step(*batch(4))  # nothing was sent: the pipeline still works
    texts = [str(error) for error in errors]
    assert texts[0] == "ranks of the schedule: expected those of the pipeline, 2, got 4"
    assert texts[1] == "chunks of this rank: expected those of the schedule, 2, got 1"
    assert texts[2] == "rows of the batch, for 4 micro-batches: expected a multiple of 4, got 6"
    assert texts[3] == "shape of the targets: expected at least one dimension, got ()"
    assert texts[4] == "rows of the targets: expected those of the inputs, 8, got 4"
    assert texts[5] == "targets: expected a tensor, got a NoneType"
    assert texts[6] == "inputs: expected a tensor, got a list"
    assert texts[7] == "step runs backward, which no_grad disables: call evaluate"


class Stage(nn.Module):
    """A stage that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def growing():
    rows = count(1)
    return lambda x: x[: next(rows)]


OUTPUTS = {
    "integers": (0, lambda x: x.long(), "output of stage 0: expected a floating-point dtype, .*, got torch.int64"),
    "another shape": (0, growing(), "expected torch.float64 of shape .1, 6., got torch.float64 of shape .2, 6."),
    "a tuple": (0, lambda x: (x,), "output of stage 0: expected one tensor, got tuple"),
    "a constant": (1, lambda x: torch.zeros_like(x, requires_grad=True), "stage 1: its output does not depend on its"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
@torch_world.on(2)
def test_a_stage_whose_output_cannot_be_sent_is_named(kind):
    grid = Grid(pp=2)
    rank, function, words = OUTPUTS[kind]
    module = Stage(function) if grid.pp.rank == rank else nn.Identity()
    pipe = Pipeline(grid, [module], make_schedule("gpipe", 2, 2), F.mse_loss)
    with pytest.raises(ArgumentError if grid.pp.rank == rank else Aborted, match=words):
        pipe.step(*batch(4))


# --- A stage that fails -----------------------------------------------------------------------------------------------


def failed(where):
    grid = Grid(dp=2, pp=2)
    stage = layers(2)[grid.pp.rank]
    pipe = Pipeline(grid, [stage], make_schedule("1f1b", 2, 4), F.mse_loss, data_parallel=DataParallel(stage, grid.dp))
    pipe.step(*batch(8))

    def fail(*_):
        raise ZeroDivisionError("this stage fails")

    if dist.get_rank() == 1:
        register = stage.register_forward_hook if where == "forward" else stage.register_full_backward_hook
        register(fail)
    started = time.monotonic()
    error = raised((ZeroDivisionError, Aborted), lambda: pipe.step(*batch(8)))
    seconds = time.monotonic() - started
    dist.barrier()  # every process lives on
    return type(error).__name__, str(error), seconds


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_error_of_a_stage_reaches_all_ranks(where):
    answers = torch_world.run(failed, 4, where)
    assert [kind for kind, _, _ in answers] == ["Aborted", "ZeroDivisionError", "Aborted", "Aborted"]
    for kind, text, seconds in answers:
        assert seconds < PROMPT
        words = "global rank 1 ended .*: ZeroDivisionError: this stage fails"
        assert kind == "ZeroDivisionError" or re.search(words, text)


# --- A rank that dies -------------------------------------------------------------------------------------------------


def killed(name, chunks, victim, after):
    """Kill the victim after some forwards of its last stage."""
    pipe, _, _ = pipeline(name, chunks)
    forwards = count()

    def kill(*_):
        if next(forwards) == after:
            os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == victim:
        pipe.chunks[-1].register_forward_pre_hook(kill)
    started = time.monotonic()
    error = raised(PeerLost, lambda: [pipe.step(*batch(MICRO_BATCHES * ROWS)) for _ in range(2)])
    return str(error), time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunks", "victim", "after"),
    [("gpipe", 1, 0, 2), ("1f1b", 1, 1, 0), ("1f1b", 1, 2, MICRO_BATCHES + 3), ("interleaved", 2, 3, 5)],
)
def test_a_rank_that_dies_is_named_on_every_other(name, chunks, victim, after):
    with harness.world(4) as pool:
        arguments = (name, chunks, victim, after)
        answers = {
            rank: answer for rank, answer, _ in outcomes(pool, torch_world.within, "ringcomm", 20.0, killed, arguments)
        }
    assert isinstance(answers.pop(victim), ConnectionError)
    assert len(answers) == 3
    for text, seconds in answers.values():
        assert f"rank {victim} (process" in text
        assert "died" in text
        assert seconds < PROMPT
