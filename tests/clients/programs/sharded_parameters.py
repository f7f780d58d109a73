"""Parameters sharded by FSDP1 and FSDP2, and tensors by DTensor."""

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, StateDictType, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor


def run(backend, size):
    dist.init_process_group(backend)
    return fsdp1(size), fsdp2(size), fsdp2(size, torch.bfloat16), dtensors(size)


def train(net, size):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for batch in tiny.batches(dist.get_rank(), size):
        optimizer.zero_grad()
        loss = tiny.loss_of(net, batch)
        loss.backward()
        clip = getattr(net, "clip_grad_norm_", lambda limit: nn.utils.clip_grad_norm_(net.parameters(), limit))
        clip(1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def fsdp1(size):
    net = FullyShardedDataParallel(tiny.model(), device_id=torch.device("cpu"))
    losses = train(net, size)
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.SHARDED_STATE_DICT):
        net.load_state_dict(net.state_dict())
    with FullyShardedDataParallel.summon_full_params(net):
        return losses, tiny.norms(net)


def fsdp2(size, dtype=None):
    net = tiny.model()
    options = {"mesh": init_device_mesh("cpu", (size,)), "mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    for layer in (net[0], net[2], net):
        fully_shard(layer, **options)
    net.set_allocate_memory_from_process_group_for_comm(True)
    losses = train(net, size)
    return losses, [parameter.full_tensor().norm().item() for parameter in net.parameters()]


def dtensors(size):
    mesh = init_device_mesh("cpu", (size,))
    x = torch.arange(24.0).view(6, 4)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    product = rows.T @ rows  # a partial sum on each rank
    layouts = [Partial()], [Replicate()], [Shard(0)], [Shard(1)]
    moved = [product.redistribute(mesh, layout) for layout in layouts if layout != [Partial()]]
    return [tensor.full_tensor().tolist() for tensor in moved], rows.mean().full_tensor().item()
