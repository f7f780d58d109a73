"""The search: every legal layout and no other, the fastest first, and why there is none."""

import time
from dataclasses import astuple, replace
from itertools import product

import pytest

from ringcomm import ArgumentError
from ringcomm.plan.cost import Pricing
from ringcomm.plan.devices import device
from ringcomm.plan.layout import RECOMPUTE, ParallelLayout
from ringcomm.plan.memory import memory_use
from ringcomm.plan.model import Transformer
from ringcomm.plan.search import differences, layouts, price, search

A100, H100 = device("a100-80gb"), device("h100-80gb")
SMALL = Transformer(layers=4, hidden=256, heads=4, vocab=1000, seq=4096)
LARGE = Transformer(layers=48, hidden=8192, heads=64, vocab=51200, seq=2048)


def every_layout(model, accelerator, gpus, batch):
    """Yield all combinations that `check` accepts and that are not the same as another."""
    sizes = range(1, gpus + 1)
    for tp, pp, dp, cp in product(sizes, repeat=4):
        if tp * pp * dp * cp != gpus or (cp > 1 and model.seq // cp < 1024):
            continue
        options = product(range(1, batch + 1), range(1, model.layers + 1), RECOMPUTE, (False, True), range(4))
        for micro_batch, chunks, recompute, sequence_parallel, zero in options:
            layout = ParallelLayout(tp, pp, dp, cp, micro_batch, chunks, recompute, sequence_parallel, zero)
            same = (sequence_parallel and tp == 1) or (zero and dp * cp == 1)
            same = same or (recompute == "selective" and accelerator.attention == "fused")
            try:
                layout.check(model, batch, gpus)
            except ArgumentError:
                continue
            if not same and not (cp > 1 and accelerator.attention == "unfused"):
                yield layout


@pytest.mark.parametrize("accelerator", [A100, H100], ids=lambda each: each.name)
@pytest.mark.parametrize("gpus", [1, 4, 6])
def test_every_legal_layout_is_considered_once(accelerator, gpus):
    found = list(layouts(SMALL, accelerator, gpus, 12))
    assert len(found) == len({*found})
    assert {*found} == {*every_layout(SMALL, accelerator, gpus, 12)}


def test_the_best_are_the_fastest_that_fit():
    cramped = replace(H100, memory=60e6, reserved=0)
    result = search(SMALL, cramped, 4, 12, top=1000)
    pricing = Pricing(SMALL, cramped, 4, 12)
    fitting = [
        (pricing.step(each).seconds, each)
        for each in layouts(SMALL, cramped, 4, 12)
        if max(memory_use(SMALL, each, cramped, 12, rank).total for rank in range(each.pp)) <= cramped.available
    ]
    assert result.legal > result.fitting == len(fitting) > len(result.best)
    assert (result.best[0].cost.seconds, result.best[0].layout) == min(fitting)
    seconds = [each.cost.seconds for each in result.best]
    assert seconds == sorted(seconds)
    shapes = {replace(each.layout, recompute="none", zero=0) for each in result.best}
    assert len(shapes) == len(result.best) == len({replace(each, recompute="none", zero=0) for _, each in fitting})


def test_the_results_are_stable_and_do_not_depend_on_their_number():
    first, again, few = (search(LARGE, A100, 512, 1536, top=top).best for top in (10, 10, 3))
    assert [each.layout for each in first] == [each.layout for each in again]
    assert [each.layout for each in first[:3]] == [each.layout for each in few]


def test_fixed_values_hold():
    fixed = {"tp": 8, "micro_batch": 4, "recompute": "full", "sequence_parallel": False, "zero": 0, "chunks": 1}
    found = search(LARGE, A100, 512, 1536, fixed, top=100).best
    assert found
    assert {tuple(getattr(each.layout, name) for name in fixed) for each in found} == {tuple(fixed.values())}
    assert search(LARGE, A100, 512, 1536, {"cp": 2}).best[0].layout.cp == 2, "as asked, though scores are stored"


def test_the_differences_of_a_layout_explain_its_time():
    best, *others = search(LARGE, A100, 512, 1536).best
    for each in others:
        found = differences(each, best)
        assert found == sorted(found, key=lambda part: -part[1])
        assert sum(seconds for _, seconds in found) == pytest.approx(each.cost.seconds - best.cost.seconds)
        assert found[-1][1] < 0, "it gains something too"


def test_ten_thousand_gpus_take_less_than_ten_seconds():
    model = Transformer(layers=120, hidden=20480, heads=160, vocab=51200, seq=4096)
    start = time.process_time()
    assert search(model, H100, 10_000, 10_000).best
    assert time.process_time() - start < 10  # it takes 1.5


def test_families_that_do_not_fit_or_divide_are_named():
    result = search(LARGE, A100, 64, 64, {"zero": 1, "recompute": "full"}, top=1000)
    assert result.short
    for (tp, pp), missing in result.short.items():
        assert missing > 0
        assert not [each for each in result.best if (each.layout.tp, each.layout.pp) == (tp, pp)]
    assert search(LARGE, A100, 96, 1536).indivisible == {"tp": [3, 6, 12, 24, 48, 96], "pp": [32, 96], "dp": []}


@pytest.mark.parametrize(
    ("gpus", "fixed", "words"),
    [
        (12, {"tp": 3}, r"tp: expected a divisor of heads = 64 \(nearest: 2 or 4\), got 3"),
        (12, {"tp": 8}, r"gpus: expected a multiple of tp 8 \(nearest: 8 or 16\), got 12"),
        (4, {"tp": 4, "pp": 4}, r"gpus: expected a multiple of tp 4 · pp 4 \(nearest: 16\), got 4"),
        (7, {}, r"48 layers, 64 heads and a batch of 16 do not divide over 7 GPUs; the nearest number is 6"),
        (14, {"tp": 2}, r"do not divide over 14 GPUs with tp 2; the nearest number is 12"),
        (8, {"chunks": 5}, "no layout of 8 GPUs has chunks 5"),
        (
            8,
            {"zero": 0},
            r"memory: no layout fits a100-80gb, which has 81.6 GB; the smallest, with tp 8 and pp 1, needs",
        ),
    ],
)
def test_a_search_without_result_says_what_is_nearest(gpus, fixed, words):
    with pytest.raises(ArgumentError, match=words):
        search(LARGE, A100, gpus, 16, fixed)


def test_one_layout_is_priced_as_in_the_search():
    best = search(LARGE, A100, 512, 1536).best[0]
    alone = price(LARGE, A100, 512, 1536, best.layout)
    assert alone.cost == best.cost
    assert astuple(alone.layout) == astuple(best.layout)
    with pytest.raises(ArgumentError, match="gpus: expected tp 1"):
        price(LARGE, A100, 512, 1536, ParallelLayout())
