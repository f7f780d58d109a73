"""State dicts: sharded parameters are DTensors, so torch's tools gather, save and reshard them."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from harness import torch_world
from ringcomm.parallel import ColumnParallelLinear, GPTConfig, Grid, RowParallelLinear, gpt_stages

CONFIG = GPTConfig(vocab_size=37, context=4, layers=1, hidden=16, heads=4)  # 37 is padded if sharded


def models(seed=0):
    """Return this rank's shards of a model, and the model of one process."""
    grid = Grid(tp=dist.get_world_size())
    return gpt_stages(CONFIG, grid, seed=seed)[0], gpt_stages(CONFIG, Grid.alone(), seed=seed)[0]


def same(one, other):
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


@torch_world.on(2, 4, backends=torch_world.BACKENDS)
def test_sharded_parameters_are_dtensors_that_gather_to_the_full_model():
    model, whole = models()
    state, expected = model.state_dict(), whole.state_dict()
    assert {name for name, x in state.items() if isinstance(x, DTensor)} == {
        "embedding.weight",
        *(
            f"blocks.0.attention.{name}"
            for name in ("query.weight", "query.bias", "key_value.weight", "key_value.bias")
        ),
        *(f"blocks.0.{name}" for name in ("attention.out.weight", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight")),
    }
    assert not any(isinstance(x, DTensor) for x in expected.values())
    assert state["embedding.weight"].shape == (37, 16)
    same({name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}, expected)
    same(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), expected)
    local = model.embedding.weight
    with torch.no_grad():
        state["embedding.weight"].to_local().fill_(3.0)  # the same memory
    assert local[0, 0] == 3.0


@torch_world.on(2)
def test_dtensors_full_tensors_and_shards_are_loaded():
    model, whole = models()
    shards = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    replicated = model.state_dict()
    weight = replicated["embedding.weight"]
    replicated["embedding.weight"] = weight.redistribute(placements=[torch.distributed.tensor.Replicate()])
    for state in (model.state_dict(), whole.state_dict(), shards, replicated):
        other, _ = models(seed=1)
        other.load_state_dict(state)
        same(dict(other.named_parameters()), shards)
    other, _ = models(seed=1)
    set_model_state_dict(other, whole.state_dict(), options=StateDictOptions(full_state_dict=True))
    same(dict(other.named_parameters()), shards)
    with pytest.raises(RuntimeError, match=r"size mismatch for weight"):
        RowParallelLinear(8, 4, model.tp).load_state_dict(nn.Linear(6, 4).state_dict())


def saved(path):
    dcp.save(models()[0].state_dict(), checkpoint_id=path)


def resharded(path):
    model, _ = models(seed=1)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()}
    same(found, gpt_stages(CONFIG, Grid.alone())[0].state_dict())


def test_torch_checkpoints_of_state_dicts_are_resharded(tmp_path):
    torch_world.run(saved, 2, tmp_path)
    for size in (1, 2, 4):
        torch_world.run(resharded, size, tmp_path)


@torch_world.on(4)
def test_the_state_dict_of_a_layer_that_fully_shard_wraps_stays_torchs():
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("fully_shard: torch 2.6")
    grid = Grid(dp=2, tp=2)
    torch.manual_seed(0)
    layer = ColumnParallelLinear(6, 8, grid.tp)
    fsdp.fully_shard(layer, mesh=grid.mesh["dp"])
    state = {name: x.clone() for name, x in layer.state_dict().items()}
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    layer.load_state_dict(state)
    same(
        {name: x.to_local() for name, x in layer.state_dict().items()},
        {name: x.to_local() for name, x in state.items()},
    )
