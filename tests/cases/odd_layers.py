"""Layers of odd sizes, which sharded optimizers must pad, and the optimizers that train them."""

from functools import partial

import torch
from torch import nn

from cases.small_gpt import mine
from harness import torch_world

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),  # has states before its first step
}
sgd, adamw = OPTIMIZERS["sgd"], OPTIMIZERS["adamw"]
stages = torch_world.each("stage", [1, 2])


class Odd(nn.Module):
    """Layers of odd sizes, a weight used twice, a scalar, a frozen layer, and one that some batches do not use."""

    def __init__(self, seed=0, dtype=torch.float64):
        torch.manual_seed(seed)
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(6, 33), nn.Linear(33, 33), nn.Linear(33, 3)
        self.frozen, self.scale, self.some = nn.Linear(3, 3), nn.Parameter(torch.tensor(1.5)), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, x, some=False):
        x = self.twice(self.twice(self.first(x).tanh()).tanh()).tanh()
        x = self.frozen(self.last(x)) * self.scale
        return self.some(x) if some else x


def rows(step, dtype=torch.float64):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(model, step, axis, dtype=torch.float64, some=False):
    return model(mine(rows(step, dtype), axis), some).float().square().mean()


def trained(zero, model, steps):
    """Take some steps; return the parameters."""
    for step in steps:
        loss_of(model, step, zero.dp, model.scale.dtype, some=True).backward()
        zero.finish_grad_sync()
        zero.step()
    return [parameter.tolist() for parameter in model.parameters()]


def same(model, expected):
    for (name, x), y in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(x, y), name
