"""Memory against the tables of the papers, and against what torch holds in real steps."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from published import ACTIVATIONS, RECOMPUTATION, gpt
from test_plan_model import config_of

import torch_world
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
from ringcomm.parallel.simulation import simulate
from ringcomm.plan.devices import device
from ringcomm.plan.layout import ParallelLayout
from ringcomm.plan.memory import in_flight, memory_use, states
from ringcomm.plan.model import Transformer

A100 = device("a100-80gb")
CPU = replace(A100, element=4, attention="fused", dropout=False)  # float32 and torch's attention


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
        found = memory_use(gpt(heads, hidden, layers), layout, A100, batch, 0).activations
        assert found / 2**30 == pytest.approx(measured, rel=1e-9)


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 1), (4, 8, 1), (4, 2, 1), (8, 8, 1), (4, 8, 2), (4, 4, 3), (2, 6, 4)])
def test_as_many_chunks_are_in_flight_as_in_the_table_of_the_schedule(p, m, v):
    layout = ParallelLayout(pp=p, chunks=v)
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
        self.held, self.tensor = held, tensor
        self.storage, self.size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if self.storage not in held.ignored:
            held.counts[self.storage] = held.counts.get(self.storage, 0) + 1
            held.now += self.size * (held.counts[self.storage] == 1)
            held.most = max(held.most, held.now)

    def __del__(self):
        if self.storage not in self.held.ignored:
            self.held.counts[self.storage] -= 1
            self.held.now -= self.size * (self.held.counts[self.storage] == 0)


MODEL = Transformer(layers=4, hidden=64, heads=4, vocab=64, seq=64)
BATCH = 8
LAYOUTS = [
    ParallelLayout(dp=4, micro_batch=2),
    ParallelLayout(tp=2, pp=2, micro_batch=2),
    ParallelLayout(pp=4, micro_batch=1),
    ParallelLayout(pp=2, dp=2, micro_batch=1, chunks=2),
    ParallelLayout(pp=2, dp=2, micro_batch=1, recompute="full"),
    ParallelLayout(dp=4, micro_batch=2, zero=1),
    ParallelLayout(dp=2, tp=2, micro_batch=2, zero=2),
]


def nbytes(tensors):
    """Return the bytes of the storages of tensors, each counted once."""
    storages = [each.untyped_storage() for each in tensors if each is not None]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@torch_world.on(4)
def test_a_step_holds_the_planned_memory_within_5_percent(layout):
    """Parameters, gradients and states of Adam before the step ends, and the most that autograd has kept."""
    grid = Grid(layout.dp, layout.tp, layout.pp)
    config = config_of(MODEL, recompute=layout.recompute == "full")
    schedule = make_schedule(layout.schedule, layout.pp, layout.micro_batches(BATCH), layout.chunks)
    chunks = gpt_stages(config, grid, schedule)
    parameters = list({id(each): each for chunk in chunks for each in chunk.parameters()}.values())
    tied, adam = gpt_tied_weights(chunks, grid), partial(torch.optim.Adam, lr=1e-3)
    if layout.zero:
        trainer = replicas = ShardedOptimizer(chunks, grid, adam, torch.float32, stage=layout.zero, tied=tied)
    else:
        trainer, replicas = MixedPrecision(chunks, grid, adam, torch.float32), DataParallel(chunks, grid.dp_cp)
    pipeline = Pipeline(
        grid, chunks, schedule, gpt_loss(config, grid), data_parallel=replicas, tied=[] if layout.zero else tied
    )
    ids = torch.zeros(BATCH // layout.dp, MODEL.seq, dtype=torch.int64)
    held = Held(parameters)
    with held.hooks():
        pipeline.step(ids, ids)
    gradients = nbytes(each.grad for each in parameters)
    if layout.zero:
        gradients = nbytes(each for bucket in replicas._buckets for each in (bucket.grad, bucket._buffer))
    trainer.step()
    optimizer = sum(nbytes(each for each in state.values() if each.dim()) for state in trainer.optimizer.state.values())

    rank = grid.pp.rank
    use = memory_use(MODEL, layout, CPU, BATCH, rank)
    activations = use.activations
    if rank == layout.pp - 1:  # logits and the loss: what is kept of what `temporary` counts
        tokens = layout.micro_batch * MODEL.seq
        activations += tokens * (4 * MODEL.vocab / layout.tp + 2 * 4 * MODEL.hidden)
    found = nbytes(parameters), gradients, optimizer, held.most
    planned = use.parameters, use.gradients, use.optimizer, activations
    assert found == pytest.approx(planned, rel=0.05)
    assert sum(found) == pytest.approx(sum(planned), rel=0.05)
