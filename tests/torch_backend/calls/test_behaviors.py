"""What the backends of torch have in common beside the calls themselves, with Gloo's results and without a compiler.

Much of it reaches a backend from torch's code in C++.
"""

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from test_clients import STEPS, batch, flat, model, train
from torch import nn
from torch._inductor.utils import run_and_get_code

from harness import torch_world

c10d = torch._C._distributed_c10d
ops = torch.ops._c10d_functional


def x():
    return torch.arange(4.0) + dist.get_rank()


def name():
    return dist.group.WORLD.group_name


def functional_collectives():
    summed = functional.all_reduce(x(), "sum", dist.group.WORLD)
    gathered = functional.all_gather_tensor(summed + 1, 0, dist.group.WORLD)
    share = functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD)
    swapped = functional.all_to_all_single(gathered, None, None, dist.group.WORLD)
    return [each.tolist() for each in (summed, gathered, share, swapped)]


def functional_collectives_of_lists():
    works = ops.all_gather_into_tensor_coalesced([x(), 2 * x()], 2, name())
    works += ops.reduce_scatter_tensor_coalesced([x(), 2 * x()], "sum", 2, name())
    works += ops.all_reduce_coalesced([x(), 2 * x()], "max", name())
    return [ops.wait_tensor(each).tolist() for each in works]


def out_variants():
    out = torch.empty(8)
    assert ops.all_gather_into_tensor_out(x(), 2, name(), out=out) is out
    return ops.wait_tensor(out).tolist()


def sharded_training():
    """Train a sharded model for a step, compiled with inductor's buckets of all_gathers and reduce_scatters."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    weights = [nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])) for _ in range(2)]
    rows = torch.randn(4, 8) + dist.get_rank()

    @torch.compile
    def loss(y):
        for weight in weights:
            y = y @ weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return y.sum()

    def step(y):
        value = loss(y)
        value.backward()
        return value.item()

    options = {
        "bucket_all_gathers_fx": "all",
        "bucket_reduce_scatters_fx": "all",
        "reorder_for_compute_comm_overlap": True,
        "compile_threads": 1,  # a rank here is a daemon, which may not start processes
        "fallback_by_default": True,  # no kernels of its own, which take half a minute to compile
    }
    with torch._inductor.config.patch(options):
        torch._dynamo.reset()
        value, code = run_and_get_code(step, rows)
        torch._dynamo.reset()
    assert "".join(code).count("= torch.ops._c10d_functional.all_gather_into_tensor_out.default(") == 1
    return [value, *(weight.grad.to_local() for weight in weights)]


def inductors_buckets():
    return [torch.as_tensor(each).tolist() for each in sharded_training()]


def traced_graph():
    def summed(y):
        return functional.all_reduce(y * 2, "sum", dist.group.WORLD) + 1

    torch._dynamo.reset()
    return torch.compile(summed, backend="aot_eager", fullgraph=True)(x()).tolist()


def builtin_hook():
    return trained("ALLREDUCE")


def builtin_fp16_hook():
    return trained("FP16_COMPRESS")


def trained(kind):
    losses, parameters = hooked(kind)
    return losses, [round(each, 5) for each in parameters.tolist()]


def hooked(kind):
    """Train with a builtin hook; return the losses, and the parameters as one array."""
    net = nn.parallel.DistributedDataParallel(model())
    net._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    losses = train(net, net.parameters(), [batch(dist.get_rank(), step) for step in range(STEPS)])
    return losses, flat(net.parameters())


def futures():
    works = [dist.all_reduce(x(), async_op=True), dist.broadcast(x(), 0, async_op=True)]
    doubled = [work.get_future().then(lambda done: 2 * done.value()[0]) for work in works]
    return [each.tolist() for each in torch.futures.wait_all(doubled)]


def coalesced_calls():
    tensors = [x(), torch.ones(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return [tensor.tolist() for tensor in tensors]


def batched_messages():
    peer, out = 1 - dist.get_rank(), torch.empty(4)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x(), peer), dist.P2POp(dist.irecv, out, peer)]):
        work.wait()
    return out.tolist()


def objects():
    seen = [None, None]
    dist.all_gather_object(seen, {"rank": dist.get_rank()})
    dist.broadcast_object_list(text := [str(dist.get_rank())], 1)
    return seen, text


def groups():
    own, _ = dist.new_subgroups(1)
    both, _ = dist.new_subgroups_by_enumeration([[0, 1]])
    summed = [x(), x()]
    dist.all_reduce(summed[0], group=own)
    dist.all_reduce(summed[1], group=both)
    return dist.get_process_group_ranks(own), dist.get_process_group_ranks(both), [each.tolist() for each in summed]


def sequence_numbers():
    group = dist.new_group()
    for _ in range(3):
        dist.all_reduce(x(), group=group)
    first = group._get_sequence_number_for_group()
    dist.broadcast(x(), 0, group=group)
    return group._get_sequence_number_for_group() - first


def debugging_in_detail():
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    y = x()
    dist.all_reduce(y, group=group)
    dist.destroy_process_group(group)
    return y.tolist()


def coalesced_broadcast():
    tensors = [x(), x() * 2]
    dist._broadcast_coalesced(dist.group.WORLD, tensors, 8, 1)
    return [tensor.tolist() for tensor in tensors]


def names_of_single_tensors():
    gathered, share, swapped = torch.empty(8), torch.empty(2), torch.empty(4)
    dist.all_gather_single(gathered, x())
    dist.reduce_scatter_single(share, x())
    dist.all_to_all_single(swapped, x())
    return [each.tolist() for each in (gathered, share, swapped)]


def registry():
    group = dist.group.WORLD
    found = c10d._resolve_process_group(group.group_name)
    return found is group, dist.ProcessGroup.unbox(group.boxed()) is group


BEHAVIORS = (
    *(functional_collectives, functional_collectives_of_lists, out_variants, inductors_buckets, traced_graph),
    *(builtin_hook, builtin_fp16_hook, futures, coalesced_calls, batched_messages, objects, groups),
    *(sequence_numbers, debugging_in_detail, coalesced_broadcast, names_of_single_tensors, registry),
)


@pytest.mark.parametrize("behavior", BEHAVIORS, ids=lambda behavior: behavior.__name__)
def test_ringcomm_behaves_as_gloo(behavior):
    ours, theirs = (torch_world.run(behavior, 2, backend=backend, timeout=60) for backend in torch_world.BACKENDS)
    assert ours == theirs
