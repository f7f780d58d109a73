"""Memory against the tables of the papers, and against what torch holds in real steps."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed.fsdp as fsdp
from published import ACTIVATIONS, RECOMPUTATION, gpt
from test_plan_model import config_of

from harness import torch_world
from harness.live_memory import LiveMemory
from ringcomm.parallel import (
    DataParallel,
    Grid,
    MixedPrecision,
    Pipeline,
    ShardedOptimizer,
    gpt_loss,
    gpt_stages,
    gpt_tied_weights,
    make_schedule,
)
from ringcomm.pipelining.simulation import simulate
from ringcomm.plan.model.devices import device
from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.transformer import Transformer
from ringcomm.plan.price import memory
from ringcomm.plan.price.memory import in_flight, memory_use, states

A100 = device("a100-80gb")
CPU = replace(A100, element=4)  # float32
UNFUSED = replace(A100, attention="unfused")


@pytest.mark.parametrize("billions", [7.5, 128, 1000])
@pytest.mark.parametrize("replicas", [1, 4, 16, 64, 256, 1024])
def test_states_are_those_of_the_table_of_zero(billions, replicas):
    """Table 1 of Rajbhandari et al. truncates these figures."""
    psi = billions * 1e9
    formulas = [16 * psi, 4 * psi + 12 * psi / replicas, 2 * psi + 14 * psi / replicas, 16 * psi / replicas]
    assert [sum(states(psi, replicas, stage)) for stage in range(4)] == pytest.approx(formulas, rel=1e-12)


def test_the_figures_of_the_table_of_zero():
    found = [sum(states(7.5e9, 64, stage)) / 1e9 for stage in range(4)]
    assert [round(each, 2) for each in found] == [120.0, 31.41, 16.64, 1.88]  # the paper: 120, 31.4, 16.6, 1.88


@pytest.mark.parametrize("row", RECOMPUTATION, ids=lambda row: f"{row[0]}B")
def test_activations_are_those_of_korthikanti_et_al(row):
    billions, heads, hidden, layers, tp, pp, chunks, batch, micro_batch, *_ = row
    for measured, recompute, sequence_parallel in zip(
        ACTIVATIONS[billions], ("none", "selective"), (False, True), strict=True
    ):
        layout = ParallelLayout(tp, pp, 1, 1, micro_batch, chunks, recompute, sequence_parallel)
        found = memory_use(gpt(heads, hidden, layers), layout, UNFUSED, batch, 0).activations
        assert found / 2**30 == pytest.approx(measured, rel=1e-9)


@pytest.mark.parametrize(
    ("p", "m", "v", "split"),
    [
        *((p, m, 1, split) for p, m in ((1, 3), (4, 8), (4, 2), (8, 8)) for split in (False, True)),
        *((p, m, v, False) for p, m, v in ((4, 8, 2), (4, 4, 3), (2, 6, 4))),
        *((p, m, 2, True) for p, m in ((2, 6), (4, 2), (4, 5), (4, 8), (8, 9))),
    ],
)
def test_as_many_chunks_are_in_flight_as_in_the_table_of_the_schedule(p, m, v, split):
    layout = ParallelLayout(pp=p, chunks=v, split_backward=split)
    peaks = simulate(make_schedule(layout.schedule, p, m, v)).peaks
    assert tuple(in_flight(layout, m, rank) for rank in range(p)) == peaks


class Held:
    """The bytes of the tensors that autograd keeps, each storage once: now, and at most."""

    def __init__(self, parameters):
        self.ignored = {each.untyped_storage().data_ptr() for each in parameters}
        self.counts, self.now, self.most = {}, 0, 0

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(partial(Saved, self), lambda saved: saved.tensor)


class Saved:
    def __init__(self, held, tensor):
        self.held, self.tensor = held, tensor.detach()  # else an output would keep its own node
        self.storage, self.size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if self.storage not in held.ignored:
            held.counts[self.storage] = held.counts.get(self.storage, 0) + 1
            held.now += self.size * (held.counts[self.storage] == 1)
            held.most = max(held.most, held.now)

    def __del__(self):
        if self.storage not in self.held.ignored:
            self.held.counts[self.storage] -= 1
            self.held.now -= self.size * (self.held.counts[self.storage] == 0)


def prepared(model, layout, batch, dtype=torch.float32, bucket_bytes=memory.BUCKET):
    """Return the parameters of a layout on this rank, and the functions that run a step's backward and its update."""
    grid = Grid(layout.dp, layout.tp, layout.pp)
    config = config_of(model, recompute=layout.recompute == "full")
    schedule = make_schedule(layout.schedule, layout.pp, layout.micro_batches(batch), layout.chunks)
    chunks = gpt_stages(config, grid, schedule)
    adam = partial(torch.optim.Adam, lr=1e-3)
    tied, replicas = gpt_tied_weights(chunks, grid), None
    if layout.zero == 3:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype)
        for chunk in chunks:
            for part in (*chunk.blocks.values(), chunk):
                fsdp.fully_shard(part, mesh=grid.mesh["dp"], mp_policy=policy)
        trainer = adam(torch.nn.ModuleList(chunks).parameters())
        tied, optimizer = gpt_tied_weights(chunks, grid), trainer
    elif layout.zero:
        trainer = replicas = ShardedOptimizer(
            chunks, grid, adam, dtype, stage=layout.zero, tied=tied, bucket_bytes=bucket_bytes
        )
        tied, optimizer = [], trainer.optimizer
    else:
        trainer, replicas = MixedPrecision(chunks, grid, adam, dtype), DataParallel(chunks, grid.dp_cp)
        optimizer = trainer.optimizer
    pipeline = Pipeline(grid, chunks, schedule, gpt_loss(config, grid), data_parallel=replicas, tied=tied)
    ids = torch.zeros(batch // layout.dp, model.seq, dtype=torch.int64)

    def update():
        trainer.step()
        trainer.zero_grad()

    parameters = list({id(each): each for chunk in chunks for each in chunk.parameters()}.values())
    return grid.pp.rank, parameters, optimizer, partial(pipeline.step, ids, ids), update


MODEL = Transformer(layers=4, hidden=64, heads=4, vocab=64, seq=64)
BATCH = 8
LAYOUTS = [
    ParallelLayout(dp=4, micro_batch=2),
    ParallelLayout(tp=2, pp=2, micro_batch=2),
    ParallelLayout(pp=4, micro_batch=1),
    ParallelLayout(pp=2, dp=2, micro_batch=1, chunks=2),
    ParallelLayout(pp=4, micro_batch=1, split_backward=True),
    ParallelLayout(pp=2, dp=2, micro_batch=1, chunks=2, split_backward=True),
    ParallelLayout(pp=2, dp=2, micro_batch=1, recompute="full"),
    ParallelLayout(dp=4, micro_batch=2, zero=1),
    ParallelLayout(dp=2, tp=2, micro_batch=2, zero=2),
]


def nbytes(tensors):
    """Return the bytes of the storages of tensors, each counted once."""
    storages = [each.untyped_storage() for each in tensors if each is not None]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


GATED = replace(MODEL, gated=True)
EXPERTS = replace(GATED, experts=4, top_k=2)


@torch_world.on(4)
@torch_world.each(
    "model, layout",
    [
        *((MODEL, layout) for layout in LAYOUTS),
        (GATED, ParallelLayout(tp=2, pp=2, micro_batch=2)),
        (EXPERTS, ParallelLayout(dp=4, micro_batch=2)),
        (EXPERTS, ParallelLayout(pp=2, dp=2, micro_batch=1, zero=1)),
        (EXPERTS, ParallelLayout(dp=2, tp=2, micro_batch=2)),
    ],
)
def test_a_rank_holds_the_planned_states_and_activations_within_5_percent(model, layout):
    """Parameters, states of Adam, and the most that autograd has kept."""
    rank, parameters, optimizer, backward, update = prepared(model, layout, BATCH)
    held = Held(parameters)
    with held.hooks():
        backward()
    update()
    states = sum(nbytes(each for each in state.values() if each.dim()) for state in optimizer.state.values())
    use = memory_use(model, layout, CPU, BATCH, rank)
    activations = use.activations
    if rank == layout.last_rank:  # logits and the loss: what is kept of what `temporary` counts
        tokens = layout.micro_batch * MODEL.seq
        waiting = in_flight(layout, BATCH, rank) if layout.schedule == "zb-h1" else 1
        activations += tokens * (4 * MODEL.vocab / layout.tp + waiting * 2 * 4 * MODEL.hidden)
    assert (nbytes(parameters), states, held.most) == pytest.approx(
        (use.parameters, use.optimizer, activations), rel=0.05
    )


# Few activations: with one micro-batch they are gone when the gradients are complete.
DEEP = Transformer(layers=8, hidden=128, heads=4, vocab=64, seq=4)
BUCKET = 1 << 18  # so that stage 2 has many


@pytest.mark.parametrize(
    ("zero", "m", "dtype"), [*((zero, m, torch.bfloat16) for zero in range(4) for m in (1, 2)), (2, 2, torch.float32)]
)
@torch_world.on(2)
def test_the_peak_of_a_step_is_the_planned_memory_within_5_percent(zero, m, dtype):
    """Gradients above all: those that micro-batches add up are whole until the last backward."""
    layout, batch = ParallelLayout(dp=2, zero=zero), 2 * m
    with LiveMemory() as live:
        rank, *_, backward, update = prepared(DEEP, layout, batch, dtype, BUCKET)
        for _ in range(2):  # the first creates the states
            live.peak = 0
            backward()
            update()
    with patch.object(memory, "BUCKET", BUCKET):
        planned = memory_use(DEEP, layout, replace(CPU, element=dtype.itemsize), batch, rank).total
    assert 0.95 < live.peak / planned < 1.05
