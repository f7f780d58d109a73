"""DistributedDataParallel compiled by inductor: in the graphs that DDP's buckets split, and as one graph."""

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def run(backend, size):
    dist.init_process_group(backend)
    return {kind: train(kind, size) for kind in ("ddp_optimizer", "python_reducer")}


def train(kind, size):
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = kind
    torch.manual_seed(0)
    layers = [nn.Linear(tiny.WIDTH, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)]
    net = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)  # two buckets
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step = torch.compile(tiny.loss_of)
    losses = []
    for batch in tiny.batches(dist.get_rank(), size):
        optimizer.zero_grad()
        if kind == "python_reducer":
            with torch._dynamo.compiled_autograd._enable(torch.compile):
                loss = step(net, batch)
                loss.backward()
        else:
            loss = step(net, batch)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, tiny.norms(net)
