"""A GPT reaches the loss of Adam with 1-bit Adam."""

from pydoc_data.topics import topics

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW

import harness
from harness import torch_world
from ringcomm.parallel import DataParallel, GPTConfig, Grid, gpt_loss, gpt_stages
from ringcomm.parallel.collectives import all_reduced
from ringcomm.parallel.data.one_bit_adam import OneBitAdam


def losses(seed, steps, warmup_steps):
    """Return the mean loss of the last fifth of the steps, with Adam and with 1-bit Adam."""
    grid = Grid(dp=dist.get_world_size())
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet, data = torch.tensor([*map(ord, text)]).unique(return_inverse=True)
    config = GPTConfig(len(alphabet), context=32, layers=2, hidden=32, heads=2)
    loss_fn, means = gpt_loss(config, grid), []
    for one_bit in (False, True):
        (model,) = gpt_stages(config, grid, seed=seed)
        if one_bit:
            optimizer = OneBitAdam(model.parameters(), grid.dp_cp, lr=3e-3, warmup_steps=warmup_steps)
        else:
            data_parallel = DataParallel(model, grid.dp_cp)
            optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        total = torch.zeros(())
        for step in range(steps):
            draw = torch.Generator().manual_seed(seed + 1000 * step + grid.dp.rank)
            starts = torch.randint(len(data) - 33, (16 // grid.dp.size,), generator=draw)
            rows = torch.stack([data[start : start + 33] for start in starts])
            loss = loss_fn(model(rows[:, :-1]), rows[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            if not one_bit:
                data_parallel.finish_grad_sync()
            optimizer.step()
            if step >= steps - steps // 5:
                total += loss.detach() / (steps // 5)
        means.append(float(all_reduced(total, grid.dp) / grid.dp.size))
        seen = [None] * grid.dp.size
        dist.all_gather_object(seen, [parameter.tolist() for parameter in model.parameters()])
        assert all(each == seen[0] for each in seen)
    return means


def test_a_gpt_reaches_the_loss_of_adam():
    adam, one_bit = torch_world.run(losses, 2, 0, 80, 20)[0]
    assert adam < 3.0  # log(103) is 4.6
    assert abs(one_bit / adam - 1) < 0.05


@pytest.mark.exhaustive
@pytest.mark.timeout(150)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_gpt_reaches_the_loss_of_adam_from_every_seed(size, seed, monkeypatch):
    monkeypatch.setattr(harness, "JOB", 120.0)
    adam, one_bit = torch_world.run(losses, size, seed, 200, 40)[0]
    print(f"Adam {adam:.3f}, 1-bit Adam {one_bit:.3f}: {100 * (one_bit / adam - 1):+.1f} %")
    assert adam < 2.75
    assert abs(one_bit / adam - 1) < 0.05
