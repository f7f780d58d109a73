"""Clients of torch.distributed on the backend, each compared with the same run on Gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from harness import pools, torch_world
from ringcomm.torch import observers

SIZE, STEPS = 4, 3


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)
        self.spare = nn.Linear(width, width)  # which not every input uses

    def forward(self, x, spare=True):
        y = self.second(F.gelu(self.first(x)))
        return self.spare(y) if spare else y


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype)


def batch(rank, step, dtype=torch.float32, rows=8):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 16, generator=generator).to(dtype)


def train(net, parameters, inputs, forward=None, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for x in inputs:
        optimizer.zero_grad()
        loss = (forward or net)(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def flat(parameters):
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in parameters]).numpy()


def same_as_on_gloo(fn):
    """Make a test of a function of the ranks: on both backends each returns the same numbers."""
    return pools.made_test(fn, [], lambda test, _, args: as_on_gloo(test, *args), first=0)


def as_on_gloo(fn, *args, size=SIZE):
    """Run on both backends, and compare the numbers that each rank returns."""
    ours = torch_world.run(fn, size, *args)
    assert_as_on_gloo(ours, fn, *args)
    return ours


def assert_as_on_gloo(ours, fn, *args):
    """Compare the numbers that each rank has returned with those on Gloo, within 1e-6 of the largest."""
    theirs = torch_world.run(fn, len(ours), *args, backend="gloo")
    for mine, expected in zip(ours, theirs, strict=True):
        for a, b in zip(mine, expected, strict=True):
            a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max()) if b.numel() else 0)


# --- DistributedDataParallel ------------------------------------------------------------------------------------------


def ddp(options, how=""):
    rank = dist.get_rank()
    # PowerSGD starts calls inside callbacks: with several buckets their order may differ between the ranks.
    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=25 if how == "PowerSGD" else 0.005, **options)
    inputs = [batch(rank, step) for step in range(STEPS)]
    forward = None
    if how == "unused":
        forward = lambda x: net(x, spare=(rank + int(abs(x[0, 0]) * 100)) % 2 == 0)  # noqa: E731 (one expression)
    if how == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        net.register_comm_hook(None, fp16_compress_hook)
    if how == "PowerSGD":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        inputs *= 2
    if how == "no_sync":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(STEPS):
            with net.no_sync():
                net(batch(rank, 10 + step)).square().mean().backward()
            net(inputs[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        losses = []
    elif how == "join":
        with net.join():
            losses = train(net, net.parameters(), [batch(rank, step) for step in range(STEPS + rank)])
    else:
        losses = train(net, net.parameters(), inputs, forward)
    return losses, flat(net.parameters())


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, ""),
        ({"gradient_as_bucket_view": True}, ""),
        ({"static_graph": True}, ""),
        ({"find_unused_parameters": True}, "unused"),
        ({}, "no_sync"),
        ({}, "join"),
    ],
    ids=["plain", "bucket views", "static graph", "unused parameters", "no_sync", "join"],
)
def test_ddp(options, how):
    results = as_on_gloo(ddp, options, how)
    for _, parameters in results:
        assert (parameters == results[0][1]).all()


def test_ddp_with_the_powersgd_hook_which_waits_inside_callbacks():
    """Not compared with Gloo: its process group is destroyed on its own thread here, which ends the process."""
    results = torch_world.run(ddp, SIZE, {}, "PowerSGD")
    for losses, parameters in results:
        assert (parameters == results[0][1]).all()
        assert losses[-1] < losses[0]


def test_ddp_with_the_fp16_hook_is_no_less_exact_than_on_gloo():
    exact = torch_world.run(ddp, SIZE, {})[0][1]
    errors = [
        abs(torch_world.run(ddp, SIZE, {}, "fp16", backend=backend)[0][1] - exact).max()
        for backend in ("ringcomm", "gloo")
    ]
    assert 0 < errors[0] <= 1.05 * errors[1]


@torch_world.on(2)
def test_ddp_makes_one_call_on_its_bucket_for_many_small_parameters():
    net = nn.parallel.DistributedDataParallel(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(100))), gradient_as_bucket_view=True
    )
    for _ in range(2):  # before the second step DDP orders its buckets anew
        net(torch.ones(2, 8)).sum().backward()
    calls = []
    observers.recorders.append(lambda _, call, outputs: calls.append((call, *outputs)))
    try:
        net(torch.ones(2, 8)).sum().backward()
    finally:
        observers.recorders.pop()
    ((call, bucket),) = calls
    assert (call, bucket.numel()) == ("all_reduce", 100 * (8 * 8 + 8))
    assert {each.grad.untyped_storage().data_ptr() for each in net.parameters()} == {bucket.data_ptr()}


@same_as_on_gloo
def test_zero_redundancy_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank = dist.get_rank()
    net = nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    losses = train(net, None, [batch(rank, step) for step in range(STEPS)], optimizer=optimizer)
    return losses, flat(net.parameters())


# --- Fully sharded ----------------------------------------------------------------------------------------------------


def fully_sharded(mesh_shape=(), mixed=False, factor=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, size = dist.get_rank(), dist.get_world_size()
    shape = mesh_shape or (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    options = {"mesh": mesh, **({"mp_policy": policy} if policy else {})}
    net = model()
    for layer in (net.first, net.second):
        fully_shard(layer, **options)
    fully_shard(net, **options)
    if factor:
        for layer in (net.first, net.second, net):
            layer.set_gradient_divide_factor(factor)
    losses = train(net, net.parameters(), [batch(rank, step) for step in range(STEPS)])
    return losses, flat(parameter.full_tensor() for parameter in net.parameters())


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed precision"])
def test_fsdp2(mixed):
    as_on_gloo(fully_sharded, (), mixed)


def test_fsdp2_with_a_gradient_divide_factor_of_one():
    """Gloo cannot do this. The result is the sum of the gradients, as in one process with all data."""
    results = torch_world.run(fully_sharded, SIZE, (), False, 1.0)
    net = model()
    losses = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        each = [net(batch(rank, step)).square().mean() for rank in range(SIZE)]
        sum(each).backward()
        optimizer.step()
        losses.append([loss.item() for loss in each])
    for rank, (got, parameters) in enumerate(results):
        torch.testing.assert_close(torch.tensor(got), torch.tensor([loss[rank] for loss in losses]))
        torch.testing.assert_close(torch.as_tensor(parameters), torch.as_tensor(flat(net.parameters())))


def test_hsdp_on_a_mesh():
    as_on_gloo(fully_sharded, (2, 2))


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def save(folder):
    import torch.distributed.checkpoint as checkpoint

    net = sharded()
    train(net, net.parameters(), [batch(dist.get_rank(), 0)])
    checkpoint.save({"model": net.state_dict(), "step": 7}, checkpoint_id=folder)
    return flat(parameter.full_tensor() for parameter in net.parameters())


def load(folder):
    import torch.distributed.checkpoint as checkpoint

    net = sharded()
    state = {"model": net.state_dict(), "step": 0}
    checkpoint.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    return flat(parameter.full_tensor() for parameter in net.parameters()), state["step"]


def test_the_sharded_state_of_fsdp2_is_saved_on_4_ranks_and_loaded_on_2(tmp_path):
    saved = torch_world.run(save, 4, str(tmp_path))
    for parameters, step in torch_world.run(load, 2, str(tmp_path)):
        assert (parameters == saved[0]).all()
        assert step == 7


# --- Tensor parallel --------------------------------------------------------------------------------------------------


def tensor_parallel(sequence):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 64), "down": nn.Linear(64, 16), "head": nn.Linear(16, 32)}
    )
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
    else:
        plan = {
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
    parallelize_module(net, mesh, plan)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x = batch(0, step, rows=8).view(2, 4, 16)
        target = torch.arange(8) % 32
        if sequence:
            x = DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [Shard(1)]).to_local()
        y = net["down"](F.gelu(net["up"](net["norm"](x))))
        with loss_parallel():
            logits = net["head"](y)
            loss = F.cross_entropy(logits.flatten(0, 1), target)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return losses, flat(full)


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_tensor_parallel_with_loss_parallel(sequence):
    as_on_gloo(tensor_parallel, sequence)


# --- Pipelines --------------------------------------------------------------------------------------------------------


def pipeline(schedule):
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    stages_here = 2 if schedule == "ScheduleInterleaved1F1B" else 1
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(size * stages_here)]
    mine = [layers[index * size + rank] for index in range(stages_here)]
    stages = [
        pipelining.PipelineStage(layer, index * size + rank, len(layers), torch.device("cpu"))
        for index, layer in enumerate(mine)
    ]
    kind = getattr(pipelining, schedule)
    plan = kind(
        stages if stages_here > 1 else stages[0], n_microbatches=4, loss_fn=lambda y, t: (y - t).square().mean()
    )
    parameters = [parameter for layer in mine for parameter in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for step in range(STEPS):
        x, target, seen = batch(0, step), batch(1, step), []
        first = (x,) if rank == 0 else ()
        last = {"target": target, "losses": seen} if rank == size - 1 else {}
        plan.step(*first, **last)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(seen)))
    return losses, flat(parameters)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_pipelines(schedule):
    as_on_gloo(pipeline, schedule)


@same_as_on_gloo
def test_a_pipeline_of_tensor_parallel_stages():
    """Each half of the ranks holds a stage: what it sends is still being reduced by its tensor-parallel layers."""
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("stage", "tensor"))
    stage, group = mesh.get_local_rank("stage"), mesh["stage"].get_group()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2)]
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    layer = parallelize_module(layers[stage], mesh["tensor"], plan)
    schedule = pipelining.Schedule1F1B(
        pipelining.PipelineStage(layer, stage, 2, torch.device("cpu"), group=group),
        n_microbatches=4,
        loss_fn=lambda y, t: (y - t).square().mean(),
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        seen = []
        first = (batch(0, step),) if stage == 0 else ()
        last = {"target": batch(1, step), "losses": seen} if stage == 1 else {}
        schedule.step(*first, **last)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(seen)))
    return losses, flat(p.full_tensor() if isinstance(p, DTensor) else p for p in layer.parameters())


# --- Functional collectives, compiled ---------------------------------------------------------------------------------


def compiled():
    import torch.distributed._functional_collectives as functional

    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    average = dist.get_backend() == "ringcomm"  # Gloo has none

    def step(x):
        x = x * 2
        total = functional.all_reduce(x, "sum", world)
        shares = functional.reduce_scatter_tensor(total, "avg" if average else "sum", 0, world)
        together = functional.all_gather_tensor(shares if average else shares / size, 0, world)
        swapped = functional.all_to_all_single(together, None, None, world)
        return functional.broadcast(swapped + total, 0, world) + functional.all_reduce(x, "max", world)

    x = batch(rank, 0)
    plain = step(x)
    if average:
        assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x), plain)
        torch._dynamo.reset()
    return [plain.double().numpy()]


def test_functional_collectives_under_torch_compile():
    as_on_gloo(compiled, size=2)  # 4 compile for twice as long
