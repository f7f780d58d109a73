"""The rules of layouts: what the plan proposes `ringcomm.parallel` accepts, and both refuse the same."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_plan_model import EXPERTS, SMALL, config_of

from ringcomm import ArgumentError, layout_rules
from ringcomm.parallel import Grid, gpt_stages, make_schedule
from ringcomm.parallel.context.sequence import sequence_positions
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.pipeline.pipeline import Pipeline
from ringcomm.plan.model.devices import device
from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.workload import Workload
from ringcomm.plan.search.layouts import layouts

BATCH = 8


def axes(**sizes):
    """Return the first rank of a grid without processes: what refuses a layout sends nothing."""
    sizes = {name: sizes.get(name, 1) for name in ("dp", "tp", "pp", "cp", "ep", "edp", "dp_cp")}
    return SimpleNamespace(**{name: Axis(name, n, 0, tuple(range(n)), None) for name, n in sizes.items()})


def build(layout, model, batch=BATCH):
    """Return the stages of the first rank of a layout."""
    grid = axes(tp=layout.tp, pp=layout.pp, dp=layout.dp, cp=layout.cp, ep=layout.ep)
    schedule = make_schedule(layout.schedule, layout.pp, layout.micro_batches(batch), layout.chunks)
    options = {"sequence_parallel": layout.sequence_parallel}
    with torch.device("meta"):
        stages = gpt_stages(config_of(model, **options), grid, schedule)
    sequence_positions(model.seq, grid.cp)
    return stages


@pytest.mark.parametrize("model", [SMALL, replace(EXPERTS, kv_heads=2)], ids=["plain", "experts"])
@pytest.mark.parametrize(("gpus", "schedule"), [(1, None), (8, None), (8, "zb-h1"), (4, "zbv")])
def test_the_plan_proposes_only_what_parallel_builds(model, gpus, schedule):
    fixed = {"schedule": schedule} if schedule else {}
    workload = Workload(model, device("a100-80gb"), gpus, BATCH)
    proposed = {replace(each, recompute="none", zero=0) for each in layouts(workload, fixed)}
    assert proposed
    for layout in proposed:
        build(layout, model)


def forward(layout, model):
    ids = torch.zeros(1, model.seq // layout.cp, dtype=torch.int64)
    build(layout, replace(model, seq=24))[0]._embed(ids)


def grid_of(layout, _):
    Grid(dp=layout.dp, ep=layout.ep)


def pipeline(layout, _):
    """Make a pipeline of one rank with the kind of schedule of the layout."""
    with Grid() as grid:
        Pipeline(
            grid, torch.nn.Linear(2, 2), make_schedule("zb-h1", 1, 4), torch.sub, recompute=layout.recompute == "full"
        )


CASES = [
    ("_heads", ParallelLayout(tp=3), SMALL, build),
    ("_kv_heads", ParallelLayout(tp=2), replace(SMALL, hidden=36, heads=6, kv_heads=3), build),
    ("_inner", ParallelLayout(tp=4), replace(SMALL, ffn=50), build),
    ("_layers", ParallelLayout(pp=3), SMALL, build),
    ("_chunks", ParallelLayout(pp=2, chunks=3), SMALL, build),
    ("_sequence", ParallelLayout(cp=5), SMALL, build),
    ("_sequence", ParallelLayout(cp=5), replace(SMALL, seq=25), build),
    ("_sharded_sequence", ParallelLayout(tp=4, sequence_parallel=True), replace(SMALL, seq=22), forward),
    ("_expert_replicas", ParallelLayout(ep=2), EXPERTS, grid_of),
    ("_experts", ParallelLayout(dp=4, ep=4), replace(EXPERTS, experts=6), build),
    ("_turns_of_chunks", ParallelLayout(pp=2, chunks=2, micro_batch=8), SMALL, build),
    ("_chunks_of_schedule", ParallelLayout(pp=2, chunks=4, split_backward=True), replace(SMALL, layers=8), build),
    ("_recomputed", ParallelLayout(pp=2, split_backward=True, recompute="full"), SMALL, pipeline),
]
# What parallel blames in these: the plan is given the axes, parallel the model and its input.
BLAMED = {
    "_sequence": "length of a sequence: expected a multiple of 2 cp = 10, got {seq}",
    "_sharded_sequence": "length of this rank's part of a sequence: expected a multiple of tp = 4, got {seq}",
    "_experts": "experts: expected a multiple of ep = 4, got 6",
}
# Of these, parallel has no number: it sees the rows of a rank, and torch's FSDP is applied by the program.
ELSEWHERE = {"_replicas", "_micro_batch", "_sharded_parameters", "_split_shards"}


def test_every_rule_has_a_case():
    assert {rule for rule, *_ in CASES} | ELSEWHERE == {each.refusal.__name__ for each in layout_rules.RULES}


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("rule", "layout", "model", "make"), CASES)
@pytest.mark.usefixtures("one_rank")
def test_plan_and_parallel_refuse_a_layout_in_the_same_words_if_they_blame_the_same(rule, layout, model, make):
    with pytest.raises(ArgumentError) as planned:
        layout.check(model, BATCH, layout.gpus)
    with pytest.raises(ArgumentError) as built:
        make(layout, model)
    assert str(built.value) == BLAMED.get(rule, str(planned.value)).format(seq=model.seq)
    (this,) = (each for each in layout_rules.RULES if each.refusal.__name__ == rule)
    assert str(planned.value) == str(layout_rules.broken(layout.numbers(model, BATCH), rules=[this]))
