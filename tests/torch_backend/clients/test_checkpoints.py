"""Distributed checkpoints, and the states of sharded models."""

import logging
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from test_clients import batch, flat, model, sharded, train
from test_start import start
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from harness import torch_world


@torch_world.on(2)
def test_a_checkpoint_is_saved_in_the_background(tmp_path):
    net = sharded()
    expected = flat(parameter.full_tensor() for parameter in net.parameters())
    background = dist.new_group()  # of a thread of its own: the calls on a group have one order
    saved = checkpoint.async_save({"model": net.state_dict()}, checkpoint_id=tmp_path, process_group=background)
    train(net, net.parameters(), [batch(dist.get_rank(), 0)])
    saved.result()
    state = {"model": net.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path)
    net.load_state_dict(state["model"])
    loaded = flat(parameter.full_tensor() for parameter in net.parameters())
    assert (loaded == expected).all()


BY_A_PROCESS = """
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

if __name__ == "__main__":
    dist.init_process_group("ringcomm")
    rank = dist.get_rank()
    kind = AsyncCheckpointerType.PROCESS
    state = {f"of rank {rank}": torch.full((3,), float(rank))}
    checkpoint.async_save(state, checkpoint_id=sys.argv[1], async_checkpointer_type=kind).result()
    dist.barrier()
    state = {f"of rank {r}": torch.empty(3) for r in range(2)}
    checkpoint.load(state, checkpoint_id=sys.argv[1])
    assert [x.tolist() for x in state.values()] == [[0.0] * 3, [1.0] * 3]
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_checkpoint_is_saved_by_another_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(BY_A_PROCESS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    start([*torchrun, program, tmp_path / "checkpoint"], GLOO_SOCKET_IFNAME="lo")  # its process uses Gloo


@torch_world.on(2)
def test_the_state_of_rank_0_is_broadcast():
    full = {name: torch.full_like(x, 3.0) for name, x in model().state_dict().items()} if dist.get_rank() == 0 else {}
    net = sharded()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, full, options=options)
    for x in get_model_state_dict(net).values():
        assert (x.full_tensor() == 3.0).all()


@torch_world.on(2)
def test_fsdp1_keeps_a_sharded_state_without_a_mesh():
    logging.getLogger("torch.distributed.fsdp").setLevel(logging.ERROR)
    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.SHARDED_STATE_DICT):
        state = net.state_dict()
        expected = {name: shard.tensor.clone() for name, x in state.items() for shard in x.local_shards()}
        train(net, net.parameters(), [batch(dist.get_rank(), 0)])
        with torch.no_grad():
            for name, x in state.items():
                for shard in x.local_shards():
                    shard.tensor.copy_(expected[name])
        net.load_state_dict(state)
        for name, x in net.state_dict().items():
            for shard in x.local_shards():
                assert torch.equal(shard.tensor, expected[name])
