"""The metrics of a step: FLOPs as torch counts them, parameters on every grid, and time on a clock of the test."""

import threading
from dataclasses import replace
from itertools import count
from math import prod
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from harness import torch_world
from ringcomm.parallel import GPTConfig, Grid, gpt_loss, gpt_stages, make_schedule
from ringcomm.parallel.model.metrics import StepMeter, StepMetrics, count_parameters, flops_per_token, measure_peak
from ringcomm.torch import observers
from ringcomm.torch.traffic import bytes_sent, record_traffic

GPT2 = GPTConfig(vocab_size=37, context=8, layers=4, hidden=16, heads=4)
LLAMA = GPTConfig(37, 8, 4, 16, 4, 2, 24, F.silu, True, False, True, rotary_base=1e4, tied=False)
LLAMA_PARAMETERS = 2 * 37 * 16 + 4 * (2 * 16 * 16 + 16 * 16 + 3 * 16 * 24 + 2 * 16) + 16
GPT2_PARAMETERS = (37 + 8) * 16 + 4 * (12 * 16 * 16 + 13 * 16) + 2 * 16


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt-2", "llama"])
@torch_world.on(1)
def test_flops_are_those_that_torch_counts(config):
    """Leave out what is not multiplied: vectors, and the table of an embedding that is not the output layer too."""
    (model,) = gpt_stages(config, Grid.alone())
    ids = torch.zeros(3, 8, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # others recompute the scores
        gpt_loss(config, Grid.alone())(model(ids), ids).backward()
    tables = ("positions.weight", *(() if config.tied else ("embedding.weight",)))
    matrices = {name: x.numel() for name, x in model.named_parameters() if x.dim() == 2 and name not in tables}
    assert flops_per_token(sum(matrices.values()), 4, 16, 8) * ids.numel() == counter.get_total_flops()


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 2, 2), (1, 1, 4)], ids=str)
def test_parameters_are_counted_once_on_every_grid(layout):
    numbers = torch_world.run(counted, layout[0] * layout[1] * layout[2], layout)
    assert {*map(tuple, numbers)} == {(GPT2_PARAMETERS, LLAMA_PARAMETERS, GPT2_PARAMETERS)}


def counted(layout):
    grid = Grid(*layout)
    schedule = make_schedule("interleaved", layout[2], layout[2], 2) if layout[2] < 4 else None
    interleaved = gpt_stages(GPT2, grid, schedule)
    with record_traffic() as calls:
        numbers = [count_parameters(chunks, grid) for chunks in (gpt_stages(GPT2, grid), gpt_stages(LLAMA, grid))]
    assert bytes_sent(calls, grid.pp.group) == 2 * 8 * 2 * (grid.pp.size - 1) / grid.pp.size
    return [*numbers, count_parameters(interleaved, grid)]


@pytest.mark.parametrize("sizes", ["dp=1", "dp=2,ep=2", "dp=2", "tp=2", "dp=2,ep=2,pp=2", "dp=4,ep=4"])
def test_experts_are_counted_once_on_every_grid_and_a_token_passes_top_k_of_them(sizes):
    mlp = 2 * 16 * 64 + 64 + 16
    whole = GPT2_PARAMETERS + 4 * (3 * mlp + 4 * 16)  # four experts and a router in place of each MLP
    ranks = prod(int(size[3:]) for size in sizes.split(",") if not size.startswith("ep"))
    for found in torch_world.run(counted_experts, ranks, sizes):
        assert found == [whole, whole - 4 * 2 * mlp]


def counted_experts(sizes):
    grid = Grid.parse(sizes)
    chunks = gpt_stages(replace(GPT2, experts=4), grid)
    return [count_parameters(chunks, grid), count_parameters(chunks, grid, active=True)]


def ticking():
    """Return a clock that each reading advances by one second."""
    return count().__next__


@torch_world.on(2)
def test_the_peak_is_the_sum_of_all_ranks():
    grid = Grid(dp=2)
    with patch("ringcomm.parallel.model.metrics.perf_counter", ticking()):
        assert measure_peak(grid, torch.float32, 16) == 2 * (2 * 16**3)
    assert measure_peak(grid, torch.bfloat16, 16) > 0


@torch_world.on(2)
def test_a_meter_divides_by_its_time_and_sees_the_calls_and_waits_of_its_thread():
    grid, x = Grid(dp=2), torch.ones(4)
    times = iter([100.0, 110.0, 130.0])
    with (
        patch("ringcomm.parallel.model.metrics.perf_counter", lambda: next(times)),
        patch("ringcomm.torch.observers.perf_counter", ticking()),
        StepMeter(grid, flops=6, peak=120.0) as meter,
    ):
        dist.all_reduce(x, group=grid.dp.group)
        dist.all_reduce(x, group=grid.dp.group, async_op=True).wait()
        thread = threading.Thread(target=dist.all_reduce, args=(x,), kwargs={"group": grid.dp.group})
        thread.start()
        thread.join()
        first = meter.read(torch.tensor(2.5), None, tokens=50)
        dist.barrier(grid.dp.group)
        second = meter.read(1.5, torch.tensor(0.25), tokens=400)
    assert first == StepMetrics(2.5, None, tokens_per_second=5.0, utilization=5 * 6 / 120, exposed=3 / 10)
    assert second == StepMetrics(1.5, 0.25, tokens_per_second=20.0, utilization=1.0, exposed=1 / 20)
    assert not observers.waits


@torch_world.on(2, backends=["gloo"])
def test_exposed_communication_is_not_known_on_other_backends():
    grid = Grid(dp=2)
    with StepMeter(grid, flops=6, peak=1e9) as meter:
        dist.barrier(grid.dp.group)
        metrics = meter.read(2.5, 0.1, tokens=50)
    assert metrics.exposed is None
    assert "exposed" not in str(metrics)


def test_metrics_are_a_line():
    line = "loss 2.1034, norm 0.93, 12,345 tokens/s, MFU 34.1%, exposed communication 5.2%"
    assert str(StepMetrics(2.10342, 0.93, 12345.4, 0.341, 0.0521)) == line
    assert str(StepMetrics(2.0, None, 5.0, 0.5, None)) == "loss 2.0000, skipped, 5 tokens/s, MFU 50.0%"
