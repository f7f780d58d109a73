"""Distributed checkpoints that a thread or a process writes while training goes on."""

import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def run(backend, size):
    dist.init_process_group(backend)
    kinds = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
    return {kind.value: save_and_restore(size, kind) for kind in kinds}, from_rank_0(size)


def sharded(size):
    net = tiny.model()
    fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    return net


def train(net, size):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for batch in tiny.batches(dist.get_rank(), size):
        optimizer.zero_grad()
        loss = tiny.loss_of(net, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_and_restore(size, kind):
    folder = f"{dist.get_backend()}-{kind.value}"
    net = sharded(size)
    before = train(net, size)
    state = {"model": net.state_dict(), "step": 4}
    # Of its own: the ranks agree on the checkpoint in it, while they train in the other.
    group = dist.new_group()
    saved = checkpoint.async_save(state, checkpoint_id=folder, async_checkpointer_type=kind, process_group=group)
    during = train(net, size)
    saved.result()
    state = {"model": net.state_dict(), "step": 0}
    checkpoint.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    assert train(net, size) == during
    return before, during, state["step"]


def from_rank_0(size):
    """Give all ranks the parameters of rank 0."""
    net = sharded(size)
    whole = {name: value + 1 for name, value in tiny.model().state_dict().items()} if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, whole, options=options)
    state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return train(net, size), [value.sum().item() for value in state.values()]
