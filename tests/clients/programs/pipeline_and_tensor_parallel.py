"""A pipeline whose stages are tensor-parallel, on a mesh of torch."""

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def run(backend, size):
    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("pipeline", "tensor"))
    return {kind.__name__: train(kind, mesh) for kind in (ScheduleGPipe, Schedule1F1B)}


def train(kind, mesh):
    place, stages = mesh["pipeline"].get_local_rank(), mesh["pipeline"].size()
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(tiny.WIDTH, 4 * tiny.WIDTH), nn.Tanh(), nn.Linear(4 * tiny.WIDTH, tiny.WIDTH))
        for _ in range(stages)
    ]
    # The block returns what torch's tensor parallelism makes by default: a tensor whose all_reduce may still run.
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate())}
    net = parallelize_module(blocks[place], mesh["tensor"], plan)
    stage = PipelineStage(net, place, stages, torch.device("cpu"), group=mesh.get_group("pipeline"))
    schedule = kind(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for x, _ in tiny.batches(0, 1):
        optimizer.zero_grad()
        of_step = []
        last = {"target": x.sin(), "losses": of_step} if place == stages - 1 else {}
        schedule.step(*([x] if place == 0 else []), **last)
        optimizer.step()
        losses += [loss.item() for loss in of_step]
    weights = [parameter.full_tensor().norm().item() for parameter in net.parameters()]
    return losses, weights
