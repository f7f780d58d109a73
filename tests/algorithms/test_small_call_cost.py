"""What a small call costs: the cache lines that the core counts, by hand, and the rounds between hosts."""

import pytest

from ringcomm import ArgumentError
from ringcomm.algorithms.small_call_cost import LINE_COST, LineCost, agreement_cost, small_call_lines

COST = LineCost(call=100, line=7)


@pytest.mark.parametrize(
    ("ranks", "topology", "lines"),
    [
        (1, None, 0),
        (2, None, 1),
        (8, None, 7),  # by one-shot, as in every group of 8
        (16, None, 7 + 1 + 2),  # up from 7 ranks and from the other leader, down from leader to leader to rank
        (64, "2x4x8", 7 + 3 + 1 + 3),  # up in a cache, a NUMA node, the host; down the three
        (8, "2x4x8", 7),  # the first cache
        (16, "1x1x16", 7 + 1 + 2),  # one cache, in two groups
        (12, "6x1x2", 1 + 5 + 2),  # a leader for each NUMA node
        (9, None, 8),  # by one-shot: through a tree 7 + 1 + 1
    ],
)
def test_the_core_counts_the_lines_that_arrive_one_after_another(ranks, topology, lines):
    assert small_call_lines(ranks, topology) == lines


@pytest.mark.parametrize("ranks", [0, 65_537])
def test_a_number_of_ranks_that_no_group_has_is_refused(ranks):
    with pytest.raises(ArgumentError, match=rf"size: expected 1 to 65536, got {ranks}"):
        small_call_lines(ranks)


def test_a_small_call_costs_its_lines():
    assert COST.seconds(small_call_lines(64, "2x4x8")) == 100 + 7 * 14


def test_the_default_is_what_2_and_16_ranks_have_taken():
    assert LINE_COST.seconds(1) == pytest.approx(1.34e-6, rel=0.01)
    assert LINE_COST.seconds(15) == pytest.approx(3.93e-6, rel=0.01)
    assert 140e-9 <= LINE_COST.line <= 190e-9


@pytest.mark.parametrize(
    ("hosts", "lines", "cost"),
    [
        (2, 0, 1000),  # a rank each: one round
        (5, 0, 3 * 1000),
        (8, 0, 3 * 1000),
        (2, 7, 1000 + (100 + 7 * 7) + (100 + 7)),  # gathered inside the host, and broadcast there
        (79, 18, 7 * 1000 + (100 + 7 * 18) + (100 + 7)),
    ],
)
def test_between_hosts_a_small_call_takes_the_rounds_of_the_agreement(hosts, lines, cost):
    assert agreement_cost(hosts, lines, COST, 1000) == cost
