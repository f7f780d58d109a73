"""The search: every legal layout and no other, the fastest first, and why there is none."""

import time
from dataclasses import asdict, astuple, replace
from functools import cache
from itertools import pairwise, product

import pytest

from ringcomm import ArgumentError
from ringcomm.plan.model.devices import device
from ringcomm.plan.model.layout import RECOMPUTE, ParallelLayout
from ringcomm.plan.model.transformer import Transformer
from ringcomm.plan.model.workload import Workload
from ringcomm.plan.price.candidate import price
from ringcomm.plan.price.memory import memory_use
from ringcomm.plan.price.step import Pricing
from ringcomm.plan.search import neighbors
from ringcomm.plan.search.layouts import layouts
from ringcomm.plan.search.search import TIE, _ordered, differences, search

A100, H100 = device("a100-80gb"), device("h100-80gb")
UNFUSED = replace(A100, attention="unfused")
SMALL = Transformer(layers=4, hidden=256, heads=4, vocab=1000, seq=4096)
LARGE = Transformer(layers=48, hidden=8192, heads=64, vocab=51200, seq=2048)


@cache  # seconds each
def best_of_512(accelerator):
    return search(Workload(LARGE, accelerator, 512, 1536))


def every_layout(model, accelerator, gpus, batch, split=False):
    """Yield all combinations that `check` accepts and that are not the same as another."""
    sizes = range(1, gpus + 1)
    for tp, pp, dp, cp in product(sizes, repeat=4):
        if tp * pp * dp * cp != gpus:
            continue
        options = product(range(1, batch + 1), range(1, model.layers + 1), RECOMPUTE, (False, True), range(4))
        for (micro_batch, chunks, recompute, sequence_parallel, zero), ep in product(options, sizes):
            layout = ParallelLayout(tp, pp, dp, cp, micro_batch, chunks, recompute, sequence_parallel, zero, split, ep)
            try:
                layout.check(model, batch, gpus)
            except ArgumentError:
                continue
            if cp == 1 if accelerator.attention == "unfused" else recompute != "selective":
                yield layout


@pytest.mark.parametrize("accelerator", [A100, UNFUSED], ids=lambda each: each.attention)
@pytest.mark.parametrize("gpus", [1, 4, 6])
def test_every_legal_layout_is_considered_once(accelerator, gpus):
    found = list(layouts(Workload(SMALL, accelerator, gpus, 6)))
    assert len(found) == len({*found})
    assert {*found} == {*every_layout(SMALL, accelerator, gpus, 6)}
    deeper = replace(SMALL, layers=8)
    split = [
        each
        for name in ("zb-h1", "zbv")
        for each in layouts(Workload(deeper, accelerator, gpus, 6), {"schedule": name})
    ]
    assert {*split} == {*every_layout(deeper, accelerator, gpus, 6, True)}
    assert len(split) == len({*split})
    experts = replace(SMALL, experts=6)
    assert {*layouts(Workload(experts, accelerator, gpus, 6))} == {*every_layout(experts, accelerator, gpus, 6)}


def test_the_best_are_the_fastest_that_fit():
    cramped = replace(H100, memory=60e6, reserved=0)
    result = search(Workload(SMALL, cramped, 4, 12), top=1000)
    pricing = Pricing(Workload(SMALL, cramped, 4, 12))
    fitting = [
        (pricing.step(each).seconds, each)
        for each in layouts(Workload(SMALL, cramped, 4, 12))
        if max(memory_use(SMALL, each, cramped, 12, rank).total for rank in range(each.pp)) <= cramped.available
    ]
    assert result.legal > result.fitting == len(fitting) > len(result.best)
    assert result.best[0].cost.seconds <= (1 + TIE) * min(fitting)[0]
    for one, other in pairwise(result.best):
        assert one.cost.seconds <= (1 + TIE) * other.cost.seconds
    plain = {"recompute": "none", "zero": 0, "chunks": 1}
    shapes = {replace(each.layout, **plain) for each in result.best}
    assert len(shapes) == len(result.best) == len({replace(each, **plain) for _, each in fitting})


def test_the_results_are_stable_and_do_not_depend_on_their_number():
    first, again, few = (search(Workload(LARGE, A100, 16, 48), top=top).best for top in (10, 10, 3))
    assert [each.layout for each in first] == [each.layout for each in again]
    assert [each.layout for each in first[:3]] == [each.layout for each in few]


def test_fixed_values_hold():
    fixed = {"tp": 8, "micro_batch": 4, "recompute": "full", "sequence_parallel": False, "zero": 0, "chunks": 1}
    found = search(Workload(LARGE, A100, 512, 1536), fixed, top=100).best
    assert found
    assert {tuple(getattr(each.layout, name) for name in fixed) for each in found} == {tuple(fixed.values())}
    assert search(Workload(LARGE, A100, 512, 1536), {"cp": 2}).best[0].layout.cp == 2


def test_the_differences_of_a_layout_explain_its_time():
    best, *others = best_of_512(A100).best
    for each in others:
        found = differences(each, best)
        assert found == sorted(found, key=lambda part: -part[1])
        assert sum(seconds for _, seconds in found) == pytest.approx(each.cost.seconds - best.cost.seconds)
        assert found[-1][1] <= 0, "where its ranks are others, it gains something too"


def test_layouts_next_to_the_best_say_what_makes_it_possible():
    result = best_of_512(A100)
    best, changed = result.best[0], {}
    for each in neighbors.near(result):
        names = [name for name, x in asdict(each.layout).items() if x != getattr(best.layout, name) and name != "dp"]
        assert len(names) == 1 or names == ["pp", "chunks"]
        changed.setdefault(names[0], []).append(each)
        if each.memory.total <= A100.available:
            assert each.cost.seconds >= best.cost.seconds
    assert changed.keys() == {"tp", "pp", "cp", "micro_batch", "chunks", "recompute", "sequence_parallel", "zero"}
    assert [each.layout.tp for each in changed["tp"]] == [4]
    assert [(each.layout.pp, each.layout.chunks) for each in changed["pp"]] == [(2, 12), (8, 6)]
    lower, higher = changed["zero"]
    assert (lower.layout, higher.layout) == (replace(best.layout, zero=0), replace(best.layout, zero=2))
    assert lower.memory.total > A100.available
    fixed = search(Workload(LARGE, A100, 512, 1536), {"zero": 2, "tp": 4})
    near = [each.layout for each in neighbors.near(fixed)]
    assert near
    assert {(each.zero, each.tp) for each in near} == {(2, 4)}


def test_the_choices_of_another_layout_are_tried_one_by_one():
    result = best_of_512(A100)
    best = result.best[0].layout
    other = replace(best, tp=4, dp=32, micro_batch=3, zero=2)
    tried = [each.layout for each in neighbors.between(result, other)]
    assert tried == [replace(best, tp=4, dp=32), replace(best, micro_batch=3), replace(best, zero=2)]
    assert neighbors.between(result, tried[1]) == [], "a single change is the other layout"
    result = best_of_512(UNFUSED)
    without = replace(result.best[0].layout, tp=1, dp=128, sequence_parallel=False)
    tried = [each.layout for each in neighbors.between(result, replace(without, zero=0))]
    assert without in tried, "what follows is changed too"


def test_experts_that_do_not_fit_on_one_rank_are_divided():
    mixtral = Transformer(32, 4096, 32, 32000, 4096, kv_heads=8, ffn=14336, gated=True, experts=8)
    result = search(Workload(mixtral, H100, 64, 512))
    best = result.best[0].layout
    assert best.ep > 1
    near = {each.layout.ep: each for each in neighbors.near(result) if each.layout.ep != best.ep}
    assert near
    alone = search(Workload(mixtral, H100, 64, 512), {"ep": 1}).best[0]
    assert alone.layout.ep == 1
    assert alone.cost.seconds > result.best[0].cost.seconds
    fewer = neighbors.between(result, replace(best, ep=1))
    assert fewer == [], "a single change is the other layout"


def test_of_equally_fast_layouts_the_simpler_is_better():
    found = [each for each in layouts(Workload(SMALL, H100, 4, 12)) if each.cp < 4]
    timed = [(1 + TIE / 2 * (each.cp == 1), each) for each in found] + [(1 - TIE, replace(found[0], cp=4))]
    _, first, *rest = [each for _, each in _ordered(timed)]
    assert (first.cp, first.tp, first.pp, first.zero, first.chunks, first.recompute) == (1, 1, 1, 0, 1, "none")
    assert [each.cp for each in rest] == sorted(each.cp for each in rest)
    free = replace(H100, inside=1e30, between=1e30, inside_latency=0.0, between_latency=0.0)
    best = search(Workload(SMALL, free, 4, 12)).best[0].layout
    assert (best.cp, best.tp, best.pp) == (1, 1, 1)


def test_ten_thousand_gpus_take_less_than_ten_seconds():
    model = Transformer(layers=120, hidden=20480, heads=160, vocab=51200, seq=4096)
    start = time.process_time()
    assert search(Workload(model, H100, 10_000, 10_000)).best
    assert time.process_time() - start < 10  # it takes 1.5


def test_families_that_do_not_fit_or_divide_are_named():
    result = search(Workload(LARGE, A100, 64, 64), {"zero": 1, "recompute": "full"}, top=1000)
    assert result.short
    for (tp, pp), missing in result.short.items():
        assert missing > 0
        assert not [each for each in result.best if (each.layout.tp, each.layout.pp) == (tp, pp)]
    assert search(Workload(LARGE, A100, 96, 1536)).indivisible == {
        "tp": [3, 6, 12, 24, 48, 96],
        "pp": [32, 96],
        "dp": [],
    }


@pytest.mark.parametrize(
    ("gpus", "fixed", "words"),
    [
        (12, {"tp": 3}, r"tp: expected a divisor of heads = 64 \(nearest: 2 or 4\), got 3"),
        (12, {"tp": 8}, r"gpus: expected a multiple of tp 8 \(nearest: 8 or 16\), got 12"),
        (4, {"tp": 4, "pp": 4}, r"gpus: expected a multiple of tp 4 · pp 4 \(nearest: 16; or pp 1\), got 4"),
        (64, {"tp": 8, "pp": 8, "dp": 2}, r"gpus: expected a multiple of tp 8 .* \(nearest: 128; or dp 1\), got 64"),
        (
            7,
            {},
            r"gpus: expected a number over which 48 layers, 64 heads and a batch of 16 divide \(nearest: 6\), got 7",
        ),
        (14, {"tp": 2}, r"divide with tp 2 \(nearest: 12\), got 14"),
        (1_000_003, {}, r"\(nearest: 1048576\), got 1000003"),
        (8, {"chunks": 5}, r"chunks: expected a divisor of layers/pp = 24 \(nearest: 4 or 6\), got 5"),
        (8, {"pp": 8, "chunks": 4}, r"chunks: expected a divisor of layers/pp = 6 \(nearest: 3 or 6\), got 4"),
        (8, {"zero": 3, "tp": 2}, "zero 3: expected tp 1, cp 1, ep 1 and chunks 1, got tp 2, cp 1, ep 1 and chunks 1"),
        (8, {"zero": 1, "dp": 1, "cp": 1}, "zero 1: expected dp > 1 or cp > 1, got dp 1 and cp 1"),
        (8, {"sequence_parallel": True, "tp": 1}, "sequence_parallel: expected tp > 1, got tp 1"),
        (8, {"chunks": 1, "schedule": "interleaved"}, "schedule: expected 1f1b, with chunks 1, got interleaved"),
        (8, {"schedule": "interleaved", "pp": 1}, "schedule: expected 1f1b with pp 1, got interleaved"),
        (8, {"schedule": "zbv", "pp": 2, "chunks": 5}, "chunks of zbv: expected 2 per rank, got 5"),
        (8, {"schedule": "zbv", "pp": 1}, "schedule: expected 1f1b with pp 1, got zbv"),
        (8, {"chunks": 2, "pp": 1}, "chunks: expected 1 with pp 1, got 2"),
        (8, {"schedule": "zbv", "recompute": "full"}, "recompute with zbv, .*: expected none, got full"),
        (8, {"micro_batch": 3}, r"micro_batch: expected a divisor of batch/dp = \d \(nearest: 2 or 4\), got 3"),
        (8, {"recompute": "selective"}, "recompute: expected none or full with fused attention"),
        (10**9 + 7, {}, "gpus: expected an integer from 1 to 1000000000, got 1000000007"),
        (
            8,
            {"zero": 0},
            r"memory: no layout fits a100-80gb, which has 76.0 GiB; the smallest, with tp 8 and pp 1, needs",
        ),
    ],
)
def test_a_search_without_result_says_what_is_nearest(gpus, fixed, words):
    with pytest.raises(ArgumentError, match=words):
        search(Workload(LARGE, A100, gpus, 16), fixed)


def test_a_search_is_refused_at_once_if_it_would_not_end_soon():
    start = time.process_time()
    with pytest.raises(ArgumentError, match="more than 500,000 layouts are possible: fix --tp, --pp or --micro-batch"):
        search(Workload(replace(LARGE, layers=720720), A100, 720720, 720720))
    with pytest.raises(ArgumentError, match="batch: expected an integer from 1 to"):
        search(Workload(LARGE, A100, 64, 10**9 + 7))
    assert time.process_time() - start < 10  # it takes 1.5


def test_no_fixed_value_beats_the_free_search():
    for accelerator in (A100, UNFUSED):
        best = search(Workload(LARGE, accelerator, 64, 64)).best[0].cost.seconds
        for fixed in ({"cp": 1}, {"cp": 2}, {"cp": 8}, {"tp": 8}, {"zero": 1}, {"recompute": "full"}):
            if accelerator is A100 or fixed.get("cp", 1) == 1:
                assert search(Workload(LARGE, accelerator, 64, 64), fixed).best[0].cost.seconds >= best * (1 - TIE)
    with pytest.raises(ArgumentError, match="cp: expected 1 with unfused attention, as ring attention is fused, got 2"):
        search(Workload(LARGE, UNFUSED, 64, 64), {"cp": 2})


def test_one_layout_is_priced_as_in_the_search():
    best = best_of_512(A100).best[0]
    alone = price(Workload(LARGE, A100, 512, 1536), best.layout)
    assert alone.cost == best.cost
    assert astuple(alone.layout) == astuple(best.layout)
    with pytest.raises(ArgumentError, match="gpus: expected tp 1"):
        price(Workload(LARGE, A100, 512, 1536), ParallelLayout())
    with pytest.raises(ArgumentError, match="recompute: expected none or full with fused attention"):
        price(Workload(LARGE, A100, 512, 1536), replace(best.layout, recompute="selective"))
