"""What torch asks of a group and of its backend, besides calls."""

import gc
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from test_clients import STEPS, as_on_gloo, batch, flat, model, same_as_on_gloo, train

from harness import torch_world
from ringcomm import CollectiveTimeout
from ringcomm.torch import process_group
from ringcomm.torch.compat import native

c10d = dist.distributed_c10d


def answers():
    """Return what torch learns of a group, without the name of the backend."""
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    flags = ["supports_coalescing", "supports_time_estimate", "supports_shrinking"]
    if hasattr(c10d, "_supports_window"):  # from torch 2.14 on
        flags.append("supports_window")
        assert c10d._supports_window(group) is backend.supports_window
    return {
        "flags": [getattr(backend, flag) for flag in flags] + [backend.supports_tensor_alloc(torch.device("cpu"))],
        "hooks": group._has_hooks(),
        "device": [str(c10d._get_object_coll_device(group)), "cpu" in c10d._device_capability(group)],
        "bound device": group.bound_device_id,
        "place": (group.rank(), group.size(), group.group_name),
        "options": (backend.options._timeout, backend.options.group_name),
        "store": type(group.get_group_store()).__name__,
        "boxed": dist.ProcessGroup.unbox(group.boxed()) is group,
        "registered": torch._C._distributed_c10d._resolve_process_group(group.group_name) is group,
    }


@torch_world.on(2)
def test_sequence_numbers_count_the_collectives():
    group = dist.group.WORLD
    first = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(3))
    dist.all_gather_into_tensor(torch.empty(2 * 3), torch.ones(3), async_op=True).wait()
    dist.barrier()
    dist.all_reduce(torch.ones(2).to_sparse())
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
    assert group._get_sequence_number_for_group() - first == 4


@torch_world.on(2)
def test_a_group_is_debugged_in_detail():
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
        other = dist.new_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    gc.collect()
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    work = dist.all_reduce(x, group=other, async_op=True)
    work.wait()
    assert x.tolist() == [4.0] * 3
    seen = [None, None]
    dist.all_gather_object(seen, dist.get_rank(), group=group)
    assert seen == [0, 1]
    if native.PYTHON_BACKENDS:
        assert type(group._get_backend(torch.device("cpu"))).__name__ == "_ProcessGroupWrapper"
    for each in (group, other):
        dist.destroy_process_group(each)
    assert not process_group._wrapped


def test_the_group_answers_as_gloo_does():
    assert torch_world.run(answers, 2) == torch_world.run(answers, 2, backend="gloo")


@torch_world.on(1)
def test_the_group_names_its_backend_and_devices():
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert group.name() == group._get_backend_name() == "ringcomm"
    assert not any((group.supports_reconfigure, group.supports_window))
    built = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
    devices = [device.type for device in dist.group.WORLD._device_types]
    assert sorted(devices) == sorted(c10d.Backend.backend_capability["ringcomm"]) == built
    with pytest.raises(RuntimeError, match="xpu"):
        dist.group.WORLD._get_backend(torch.device("xpu"))


NOT_IMPORTED = """
import torch.distributed as dist
dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())
dist.destroy_process_group()
"""


@torch_world.through_cpp
def test_torch_finds_the_backend_that_no_import_has_registered(tmp_path):
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", NOT_IMPORTED]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ringcomm\n", done.stderr


@torch_world.on(2)
def test_set_pg_timeout_takes_effect():
    rank = dist.get_rank()
    group = dist.new_group()
    c10d._set_pg_timeout(timedelta(seconds=0.3), group)
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=0.3)
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"0\.3 s"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


@torch_world.on(1, backends=("gloo",))
def test_set_pg_timeout_still_serves_gloo():
    c10d._set_pg_timeout(timedelta(seconds=9))
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=9)


@same_as_on_gloo
def test_fsdp2_allocates_memory_from_the_group():
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net)
    net.set_allocate_memory_from_process_group_for_comm(True)
    losses = train(net, net.parameters(), [batch(dist.get_rank(), step) for step in range(STEPS)])
    return losses, flat(parameter.full_tensor() for parameter in net.parameters())


def sharded_tensor():
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    rank, size = dist.get_rank(), dist.get_world_size()
    x = sharded_tensor.zeros(ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(size)]), 2 * size, 3)
    x.local_shards()[0].tensor.add_(rank)
    out = torch.empty(2 * size, 3) if rank == 0 else None
    x.gather(0, out)
    return [out if rank == 0 else 0, x.cpu().local_shards()[0].tensor]


@pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(), reason="torch puts it on the GPU that it expects"
)
def test_a_sharded_tensor_is_gathered():
    as_on_gloo(sharded_tensor)
