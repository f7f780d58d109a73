"""`ringcomm.torch.step` marks the steps in the trace of the default group, whose ranks are those of the job."""

import pytest
import torch
import torch.distributed as dist

from harness import torch_world
from ringcomm.errors import ArgumentError
from ringcomm.torch.shared import communicator_of
from ringcomm.trace.entries import read


def two_steps(folder):
    import ringcomm.torch

    part = dist.new_group([0, 1])
    with communicator_of().trace(folder):
        for _ in range(2):
            dist.all_reduce(torch.ones(4))
            dist.all_reduce(torch.ones(4), group=part)
            ringcomm.torch.step()
    ringcomm.torch.step()  # outside of a trace it does nothing


def test_steps_are_marked(tmp_path):
    torch_world.run(two_steps, 2, tmp_path)
    recordings = read(tmp_path)
    assert [each.rank for each in recordings] == [0, 1]
    for each in recordings:
        assert [call.name for call in each.calls if call.kind != "wait"] == ["all_reduce", "step"] * 2


def in_a_part(folder):
    part = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        with communicator_of(part).trace(folder):
            dist.all_reduce(torch.ones(4), group=part)


def test_a_trace_has_the_ranks_of_the_default_group(tmp_path):
    torch_world.run(in_a_part, 3, tmp_path)
    assert [(each.size, each.job_rank, each.job_size) for each in read(tmp_path)] == [(2, 1, 3), (2, 2, 3)]


def refused():
    import ringcomm.torch

    with pytest.raises(ArgumentError, match="step needs a default group"):
        ringcomm.torch.step()


def test_another_backend_is_refused():
    torch_world.run(refused, 2, backend="gloo")


def test_without_a_group_it_is_refused():
    refused()
