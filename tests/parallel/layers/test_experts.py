"""Experts on many ranks equal all experts on one, in float64: losses, gradients, norms, weights and dropped tokens."""

from fractions import Fraction
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import nn

from cases.expert_blocks import INNER, B, E, H, S, Stage, batches_of, double, drawn, one_by_one
from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import (
    DataParallel,
    Grid,
    Pipeline,
    clip_grad_norm,
    grad_norm,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
)
from ringcomm.parallel.data.buckets import partition_by_axis
from ringcomm.parallel.experts.layer import Experts
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.model.verify import FLOOR, full_values
from ringcomm.parallel.sharding import ExpertAxes
from ringcomm.torch.traffic import bytes_sent, record_traffic


def mean(x, axis):
    total = x.detach().clone()
    dist.all_reduce(total, group=axis.group)
    return float(total / axis.size)


def whole_values(kind, chunks, grid):
    """Return the values of the full model, with the experts of all ranks."""
    shards = [None] * grid.ep.size
    dist.all_gather_object(shards, full_values(kind, chunks, grid), grid.ep.group)
    full = {}
    for name, x in (item for shard in shards for item in shard.items()):
        assert torch.equal(full.setdefault(name, x), x), f"the ranks of ep differ in {name}"
    return full


def same(chunks, whole, grid, kind):
    got, expected = whole_values(kind, chunks, grid), full_values(kind, whole, Grid.alone())
    assert got.keys() == expected.keys()
    largest = max(float(x.abs().max()) for x in expected.values())
    for name, x in expected.items():
        torch.testing.assert_close(got[name], x, rtol=1e-10, atol=1e-10 * FLOOR * largest, msg=name)


OPTIONS = {
    "dropless": {},
    "capacity": {"capacity_factor": 0.75},
    "switch": {"top_k": 1, "capacity_factor": 1.0, "balance": 0.5},
    "llama": {"top_k": 3, "gated": True, "bias": False, "activation": F.silu},
    "recomputed": {"recompute": True, "capacity_factor": 0.75},
}


def compared(sizes, options, steps=3):
    grid, alone = Grid.parse(sizes), Grid.alone()
    model, whole = Stage(grid, **options), Stage(alone, **{**options, "sequence_parallel": False})
    data_parallel = DataParallel(model, grid.dp_cp, bucket_bytes=3000)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, whole)]
    dropped = 0
    for step in range(steps):
        for optimizer in optimizers if step != 1 else ():  # the second step accumulates
            optimizer.zero_grad()
        batches = batches_of(grid.dp_cp.size, step)
        expected = one_by_one(whole, batches)
        x, y = batches[grid.dp_cp.rank]
        loss = F.mse_loss(model(x), y)
        loss.backward()
        data_parallel.finish_grad_sync()
        assert abs(mean(loss, grid.dp_cp) / expected - 1) <= 1e-12
        same([model], [whole], grid, "gradient")
        if step:
            norm, reference = clip_grad_norm(model, grid, 0.1), nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            assert abs(norm / reference - 1) <= 1e-12
            for optimizer in optimizers:
                optimizer.step()
        dropped += sum(block.moe.dropped for block in model.blocks.values())
    same([model], [whole], grid, "weight")
    assert (dropped > 0) == ("capacity_factor" in options)


LAYOUTS = ["dp=1", "dp=4,ep=2", "dp=2,ep=2,tp=2", "dp=2,cp=2,ep=2"]
LARGE = [
    "dp=4,ep=4",
    "dp=8,ep=4",
    "dp=8,ep=2",
    "dp=4,ep=4,tp=2",
    "dp=4,ep=2,tp=2",
    "dp=2,ep=2,tp=4",
    "dp=2,cp=2,ep=2,tp=2",
]


def size_of(sizes):
    return prod(int(part.split("=")[1]) for part in sizes.split(",") if not part.startswith("ep"))


def train_as_one_process(sizes, option, backend="ringcomm", **more):
    torch_world.run(compared, size_of(sizes), sizes, {**OPTIONS[option], **more}, backend=backend)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_every_layout_trains_as_one_process(sizes):
    train_as_one_process(sizes, "dropless")


@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "dropless"])
def test_every_option_trains_as_one_process(option):
    train_as_one_process("dp=2,ep=2,tp=2", option, sequence_parallel=option != "recomputed")


def test_experts_train_as_one_process_on_gloo():
    train_as_one_process("dp=2,ep=2", "capacity", backend="gloo")


@pytest.mark.exhaustive
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence-parallel"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("sizes", LAYOUTS + LARGE)
def test_every_layout_trains_as_one_process_with_every_option(sizes, option, sequence_parallel):
    train_as_one_process(sizes, option, sequence_parallel=sequence_parallel)


MICRO_BATCHES = 2


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@torch_world.on(4)
def test_stages_of_a_pipeline_train_as_one_process(schedule):
    grid, alone = Grid(dp=2, pp=2, ep=2), Grid.alone()
    stage, whole = Stage(grid, [grid.pp.rank], balance=0.5), Stage(alone, balance=0.5)
    schedule = make_schedule(schedule, 2, MICRO_BATCHES)
    pipeline = Pipeline(grid, stage, schedule, F.mse_loss, data_parallel=DataParallel(stage, grid.dp_cp))
    batches = batches_of(2, 0, rows=B * MICRO_BATCHES)
    parts = [part for x, y in batches for part in zip(x.split(B), y.split(B), strict=True)]
    expected = one_by_one(whole, parts)
    assert abs(pipeline.step(*batches[grid.dp.rank]) / expected - 1) <= 1e-12
    same([stage], [whole], grid, "gradient")


# --- Replicas ---------------------------------------------------------------------------------------------------------


@torch_world.on(4)
def test_experts_start_from_the_first_rank_that_holds_them():
    grid = Grid(dp=4, ep=2)
    model = Stage(grid, seed=grid.dp.rank)
    DataParallel(model, grid.dp_cp)
    first, drawn_here = Stage(grid, seed=0), Stage(grid, seed=grid.ep.rank)
    for name, x in model.state_dict().items():
        expected = (drawn_here if "experts" in name else first).state_dict()[name]
        assert torch.equal(x, expected), name


@torch_world.on(2)
def test_replicas_with_experts_of_other_shapes_are_refused():
    grid = Grid(dp=2, ep=2)
    torch.manual_seed(0)
    layer = Experts(H, INNER + grid.dp.rank, E, grid)
    words = "tensor 1 of replica 1 .rank 1.: expected as on rank 0, an expert's .12, 8. .*, got an expert's .13, 8. "
    with pytest.raises(ArgumentError, match=words):
        DataParallel(layer, grid.dp_cp)


def test_buckets_of_experts_are_apart_and_in_the_order_in_which_backward_fills_them():
    dp, ep, edp = (Axis(name, 2, 0, (0, 1), None) for name in ("dp", "ep", "edp"))
    layers = [nn.Linear(5, 1, bias=False) for _ in range(6)]
    for layer in layers[1::2]:
        layer.expert_axes = ExpertAxes(ep, edp)
    layers[0].expert_axes = "of another library"
    module = nn.Sequential(*layers)
    names = {layer.weight: number for number, layer in enumerate(layers)}
    lists = partition_by_axis(list(module.parameters())[::-1], dp, module, 40)
    assert [(axis.name, [names[each] for each in members]) for axis, members in lists] == [
        *(("edp", [5, 3]), ("dp", [4, 2]), ("edp", [1]), ("dp", [0]))
    ]


@torch_world.on(4)
def test_gradients_of_experts_are_reduced_by_the_ranks_that_hold_them_and_their_norms_by_the_others():
    grid = Grid(dp=4, ep=2)
    model = Stage(grid)
    data_parallel = DataParallel(model, grid.dp_cp)
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if "experts" in name)
    with record_traffic() as calls:
        model(drawn(B, S, H)).sum().backward()
        data_parallel.finish_grad_sync()
    assert bytes_sent(calls, grid.edp.group) == experts  # 2(d-1)/d is 1
    assert bytes_sent(calls, grid.dp_cp.group) == Fraction(3, 2) * (sum(sizes.values()) - experts)
    with record_traffic() as calls:
        grad_norm(model, grid)
    assert [bytes_sent(calls, axis.group) for axis in (grid.ep, grid.edp, grid.dp_cp, grid.model)] == [8, 0, 0, 0]


# --- Checkpoints ------------------------------------------------------------------------------------------------------


class Training:
    """Trains on four batches per step, however many replicas there are."""

    def __init__(self, sizes, seed):
        self.grid = Grid.parse(sizes)
        self.model = Stage(self.grid, seed=seed, capacity_factor=0.75)
        self.data_parallel = DataParallel(self.model, self.grid.dp)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, number):
        mine = batches_of(4, number)[self.grid.dp.rank :: self.grid.dp.size]
        with self.data_parallel.no_sync():
            loss = one_by_one(self.model, mine)
        self.data_parallel.finish_grad_sync()
        clip_grad_norm(self.model, self.grid, 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean(torch.tensor(loss, dtype=double), self.grid.dp)


def saved(path):
    training = Training("dp=4,ep=4", 0)
    training.step(0)
    save_checkpoint(path, [training.model], training.optimizer, training.grid, {"step": 1})
    return training.step(1), training.step(2)


def resumed(sizes, path):
    training = Training(sizes, 1)
    assert load_checkpoint(path, [training.model], training.optimizer, training.grid) == {"step": 1}
    return training.step(1), training.step(2)


def test_training_continues_from_a_checkpoint_on_grids_with_other_experts(tmp_path):
    expected = torch_world.run(saved, 4, str(tmp_path))[0]
    for sizes in ("dp=1", "dp=2,ep=2", "dp=4,ep=2", "dp=2,ep=2,tp=2"):
        for losses in torch_world.run(resumed, size_of(sizes), sizes, str(tmp_path)):
            assert losses == pytest.approx(expected, rel=1e-10)
