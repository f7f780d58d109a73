"""Pipelines that cannot be, stages that return what cannot be sent, and ranks that die."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

import torch_world
from failures import PROMPT, mortals, outcomes, raised
from pipelines import MICRO_BATCHES, ROWS, batch, layers, pipeline
from ringcomm import Aborted, ArgumentError, PeerLost
from ringcomm.parallel import DataParallel, Grid, Pipeline
from ringcomm.parallel.schedule import make_schedule


def refusals():
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
    with torch.no_grad():
        errors.append(raised(ArgumentError, lambda: pipe.step(*batch(4))))
    pipe.step(*batch(4))  # nothing was sent: it goes on
    return [str(error) for error in errors]


def test_what_does_not_fit_is_refused_with_the_numbers():
    for texts in torch_world.run(refusals, 2):
        assert texts[0] == "ranks of the schedule: expected those of the pipeline, 2, got 4"
        assert texts[1] == "chunks of this rank: expected those of the schedule, 2, got 1"
        assert texts[2] == "rows of the inputs, for 4 micro-batches: expected a multiple of 4, got 6"
        assert texts[3] == "rows of the targets, for 4 micro-batches: expected a multiple of 4, got 0"
        assert texts[4] == "rows of the targets: expected those of the inputs, 8, got 4"
        assert texts[5] == "step goes backward, which no_grad forbids: call evaluate"


class Wrong(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.kind == "integers":
            return x.long()
        if self.kind == "a tuple":
            return (x,)
        if self.kind == "another shape":
            return x[: self.calls]
        return torch.zeros_like(x).requires_grad_()


def wrong_stages(kind):
    grid = Grid(pp=2)
    module = Wrong(kind) if grid.pp.rank == (kind == "a constant") else nn.Identity()
    pipe = Pipeline(grid, [module], make_schedule("gpipe", 2, 2), F.mse_loss)
    if grid.pp.rank == (kind == "a constant"):
        return str(raised(ArgumentError, lambda: pipe.step(*batch(4))))
    with pytest.raises(Exception, match="rank"):
        pipe.step(*batch(4))
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("integers", "what stage 0 returns: expected at most 8 dimensions of one of .*, got torch.int64 of shape"),
        (
            "another shape",
            "of the same shape: expected torch.float64 of shape .1, 6., got torch.float64 of shape .2, 6.",
        ),
        ("a tuple", "what stage 0 returns: expected one tensor, got tuple"),
        ("a constant", "stage 1: what it returns does not depend on what it is given"),
    ],
)
def test_a_stage_that_returns_what_cannot_be_sent_is_named(kind, words):
    with mortals(2) as pool:
        answers = {}
        for rank, answer, _ in outcomes(pool, torch_world.within, "ringcomm", 2.0, wrong_stages, (kind,)):
            answers[rank] = answer
    (text,) = filter(None, answers.values())
    assert re.search(words, text)


# --- A rank that fails, and lives on ----------------------------------------------------------------------------------


class Failing(nn.Module):
    """A stage that raises an error, in forward or in backward."""

    def __init__(self, inner, where):
        super().__init__()
        self.inner, self.where = inner, where

    def forward(self, x):
        if self.where == "forward":
            self.fail()
        y = self.inner(x)
        y.register_hook(self.fail)
        return y

    def fail(self, *_):
        raise ZeroDivisionError("this stage fails")


def failed(where):
    grid = Grid(dp=2, pp=2)
    stage = layers(2)[grid.pp.rank]
    pipe = Pipeline(grid, [stage], make_schedule("1f1b", 2, 4), F.mse_loss, replicas=DataParallel(stage, grid.dp))
    pipe.step(*batch(8))
    if dist.get_rank() == 1:
        pipe.chunks = [Failing(stage, where)]
    started = time.monotonic()
    error = raised((ZeroDivisionError, Aborted), lambda: pipe.step(*batch(8)))
    seconds = time.monotonic() - started
    dist.barrier()  # nobody has left
    return type(error).__name__, str(error), seconds


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_stage_that_fails_is_told_to_all_ranks_also_if_its_process_lives_on(where):
    answers = torch_world.run(failed, 4, where)
    assert [kind for kind, _, _ in answers] == ["Aborted", "ZeroDivisionError", "Aborted", "Aborted"]
    for kind, text, seconds in answers:
        assert seconds < PROMPT
        assert kind == "ZeroDivisionError" or re.search("rank 1 aborted .*: ZeroDivisionError: this stage fails", text)


# --- A rank that dies -------------------------------------------------------------------------------------------------


class Mortal(nn.Module):
    """A stage that kills its process."""

    def __init__(self, inner, after):
        super().__init__()
        self.inner, self.left = inner, after

    def forward(self, x):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return self.inner(x)


def killed(name, chunks, victim, after):
    pipe, _, _ = pipeline(name, chunks)
    if dist.get_rank() == victim:
        pipe.chunks[-1] = Mortal(pipe.chunks[-1], after)
    started = time.monotonic()
    error = raised(PeerLost, lambda: [pipe.step(*batch(MICRO_BATCHES * ROWS)) for _ in range(2)])
    return str(error), time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunks", "victim", "after"),
    [("gpipe", 1, 0, 2), ("1f1b", 1, 1, 0), ("1f1b", 1, 2, MICRO_BATCHES + 3), ("interleaved", 2, 3, 5)],
)
def test_a_rank_that_dies_in_a_pipeline_is_named_on_every_other(name, chunks, victim, after):
    with mortals(4) as pool:
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
