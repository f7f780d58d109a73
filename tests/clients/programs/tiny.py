"""The model and the data that the programs train on, and how they end."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

WIDTH = 8
ROWS = 32
BATCH = 4  # of each rank: four steps on two ranks


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 1))


def dataset():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def batches(rank, size):
    """Yield the batches of one rank."""
    x, y = dataset().tensors
    yield from zip(x[rank::size].split(BATCH), y[rank::size].split(BATCH), strict=True)


def loss_of(net, batch):
    x, y = batch
    return nn.functional.mse_loss(net(x), y)


def norms(net):
    return [parameter.detach().double().norm().item() for parameter in net.parameters()]


def finish(backend, result):
    """Write what all ranks return to a file named after the backend, and leave the group."""
    assert dist.get_backend() == backend  # not another one, which the client has chosen
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        Path(f"{backend}.json").write_text(json.dumps(results))
    if backend == "gloo":  # a thread of its own may hold the last reference to the group: the process aborts, or hangs
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()
