"""The price of schedules: the model by hand, closed forms against recordings, and what is chosen by them."""

from itertools import count

import pytest

from ringcomm.algorithms import ALGORITHMS, record
from ringcomm.algorithms.cost import CLUSTER, Cluster, Link, bound, closed_form, price
from ringcomm.algorithms.rounds import ROUNDS, Rounds
from ringcomm.algorithms.schedule import Block, Lengths, Port, even
from ringcomm.algorithms.select import hierarchy, select
from ringcomm.algorithms.waves import Course

# Whole numbers, so that sums of them are exact in whatever order. A message costs 100 and 3 per element in a node, 1000
# and 5 per element between two; an element is worked on in 2.
INSIDE, BETWEEN, WORK = Link(100, 3), Link(1000, 5), 2
ALONE = Cluster(INSIDE, BETWEEN, WORK, ranks=1)  # each on its own node
TOGETHER = Cluster(INSIDE, BETWEEN, WORK, ranks=1000)

every = pytest.mark.parametrize(
    "algorithm", [one for found in ALGORITHMS.values() for one in found.values()], ids=lambda algorithm: algorithm.title
)


def course(algorithm, size, length):
    lengths = Lengths(even(length, size))
    return Course.of(record.__wrapped__(algorithm, rank, size, lengths) for rank in range(size))


def length_for(algorithm, size):
    """Return a length that divides evenly by all that the algorithm divides by."""
    unit = size << size.bit_length()
    # A chain has as many pieces as it has steps more than two ranks would need without them.
    pieces = lambda length: int(algorithm.steps(size, length)) - size + 2  # noqa: E731 (one expression)
    fits = (length for length in count(unit, unit) if algorithm.name != "chain" or length % pieces(length) == 0)
    return next(fits)


def told(*ranks):
    """Return the course of ranks that do this; each is a function over a port and a block of 10 elements."""
    schedules = []
    for rank, tell in enumerate(ranks):
        port = Port(rank, len(ranks))
        tell(port, port.scratch(10))
        schedules.append(port.schedule())
    return Course.of(schedules)


def test_a_message_costs_its_link():
    pair = told(lambda port, block: port.send(block, 1), lambda port, block: port.recv(block, 0))
    assert price(pair, 1, TOGETHER) == 100 + 3 * 10
    assert price(pair, 1, ALONE) == 1000 + 5 * 10
    assert price(pair, 4, ALONE) == 1000 + 5 * 40


def test_what_came_is_then_reduced():
    pair = told(lambda port, block: port.send(block, 1), lambda port, block: port.recv(block, 0, operand=block))
    assert price(pair, 1, TOGETHER) == 100 + 3 * 10 + 2 * 10


def test_a_copy_costs_work_wherever_it_stands():
    def copies(port, block):
        port.copy(block, port.scratch(10))
        port.copy(block, port.scratch(10))
        port.send(block, 1)
        port.copy(block, port.scratch(10))

    pair = told(copies, lambda port, block: port.recv(block, 0))
    assert price(pair, 1, TOGETHER) == 2 * 20 + (100 + 3 * 10) + 2 * 10
    assert price(told(lambda port, block: port.copy(block, port.scratch(10))), 1, TOGETHER) == 20


def test_a_transfer_waits_for_the_later_of_its_ranks():
    def late(port, block):
        port.copy(block, port.scratch(10))
        port.recv(block, 0)

    assert price(told(lambda port, block: port.send(block, 1), late), 1, TOGETHER) == 20 + 130


def test_both_halves_of_an_exchange_run_at_once_and_a_rank_waits_for_both():
    def exchanges(port, block):
        port.exchange(block, 1, port.scratch(5), 2)
        port.send(block, 1)

    def receives(port, block):
        port.recv(block, 0)
        port.recv(block, 0)

    def slow(port, block):
        port.copy(block, port.scratch(10))
        port.send(block.part(0, 5), 0)

    assert price(told(exchanges, receives, slow), 1, TOGETHER) == (20 + 100 + 3 * 5) + 130


@pytest.mark.parametrize("receivers", [(2, 3), (2, 4), (4, 2)])
def test_ranks_that_send_at_once_share_the_link_of_their_node(receivers):
    """Nodes of two; the receivers are in one node, or in two."""

    def send(dest):
        return lambda port, block: port.send(block, dest)

    def receive(port, block):
        if port.rank in receivers:
            port.recv(block, receivers.index(port.rank))

    ranks = told(*map(send, receivers), *[receive] * 4)
    assert price(ranks, 1, ALONE._replace(ranks=2)) == 1000 + 2 * 5 * 10
    assert price(ranks, 1, ALONE) == 1000 + 5 * 10


def test_ranks_share_the_link_of_the_node_that_all_send_to():
    receive = [lambda port, block, source=source: port.recv(block, source) for source in (2, 4)]
    send = [lambda port, block, dest=dest: port.send(block, dest) for dest in (0, 1)]
    idle = lambda port, block: None  # noqa: E731 (one expression)
    assert price(told(*receive, send[0], idle, send[1], idle), 1, ALONE._replace(ranks=2)) == 1000 + 2 * 5 * 10


def test_what_goes_out_does_not_share_with_what_comes_in():
    swap = [lambda port, block, peer=peer: port.exchange(block, peer, Block(2, 10, 20), peer) for peer in (1, 0)]
    assert price(told(*swap), 1, ALONE) == 1000 + 5 * 10


def test_a_rank_goes_on_when_the_longer_half_is_done():
    def exchanges(port, block):
        port.exchange(block, 1, port.scratch(5), 2)
        port.copy(block, port.scratch(10))

    receives = lambda port, block: port.recv(block, 0)  # noqa: E731 (one expression)
    sends = lambda port, block: port.send(block.part(0, 5), 0)  # noqa: E731 (one expression)
    assert price(told(exchanges, receives, sends), 1, TOGETHER) == (100 + 3 * 10) + 2 * 10


def test_ranks_that_wait_for_each_other_have_no_price():
    stuck = told(*[lambda port, block: port.send(block, 1 - port.rank)] * 2)
    with pytest.raises(AssertionError, match="the ranks wait for each other"):
        price(stuck, 1, ALONE)


def test_every_algorithm_has_a_closed_form():
    assert {(collective, name) for collective, found in ALGORITHMS.items() for name in found} == ROUNDS.keys()


@every
def test_closed_form_and_recording_agree_exactly(algorithm):
    for size in range(2, 65):
        length = length_for(algorithm, size)
        ranks = course(algorithm, size, length)
        for cluster in (ALONE, TOGETHER):
            expected = price(ranks, 4, cluster)
            assert closed_form(algorithm, size, length, 4, cluster) == expected, f"{size} ranks, {length} elements"


@every
def test_on_two_kinds_of_links_a_closed_form_is_never_less(algorithm):
    for size in (3, 6, 8, 10, 16, 24, 37, 64):
        length = length_for(algorithm, size)
        ranks = course(algorithm, size, length)
        for local in (2, 3, 4, 8):
            cluster = ALONE._replace(ranks=local)
            found, expected = closed_form(algorithm, size, length, 4, cluster), price(ranks, 4, cluster)
            assert found >= expected, f"{size} ranks in nodes of {local}"
            if size in (8, 16, 64) and local != 3 and algorithm.name != "chain":
                assert found == expected, f"{size} ranks in nodes of {local}: powers of two"


def test_the_steps_that_are_declared_are_those_of_the_closed_form():
    for (collective, name), rounds in ROUNDS.items():
        for size in (2, 5, 64, 100_000):
            found = bound(rounds(size, 1), size, 1, Cluster(Link(1, 0), Link(1, 0), 0, ranks=1))
            assert found == ALGORITHMS[collective][name].steps(size, 1), f"{name} {collective}, {size} ranks"


def test_rounds_cost_their_link_shared_by_as_many_as_there_are():
    nodes = ALONE._replace(ranks=4)
    assert bound([Rounds(3, 10, within=8, lanes=2, worked=7)], 8, 1, nodes) == 3 * (1000 + 2 * 5 * 10 + 2 * 7)
    assert bound([Rounds(1, 10, within=8, lanes=9)], 8, 1, nodes) == 1000 + 4 * 5 * 10
    assert bound([Rounds(1, 10, within=2, lanes=9)], 8, 1, nodes) == 100 + 3 * 10
    assert bound([Rounds(1, 10, within=8, lanes=9)], 4, 1, nodes) == 100 + 3 * 10
    assert bound([Rounds.of_work(10)], 8, 1, nodes) == 2 * 10


def test_the_hierarchy_is_the_sum_of_its_three_parts():
    nodes = ALONE._replace(ranks=4)  # 2 of them: 8 ranks, 80 elements, a share of 20
    scatter = 100 + 3 * 60 + 2 * 60
    gather = 100 + 3 * 60
    # By halves: 10 elements each way, four ranks of a node at once; reduced between.
    across = 2 * (1000 + 4 * 5 * 10) + 2 * 10
    doubling = 1000 + 4 * 5 * 20 + 2 * 20 + 2 * 20
    assert doubling < across
    assert hierarchy(2, 80, 1, nodes) == scatter + doubling + gather
    assert hierarchy(2, 80, 1, ALONE) == closed_form(ALGORITHMS["all_reduce"]["recursive_doubling"], 2, 80, 1, ALONE)


def test_the_hierarchy_takes_what_is_cheapest_between_the_nodes():
    nodes = ALONE._replace(ranks=4)
    across = ALONE._replace(between=BETWEEN._replace(beta=4 * BETWEEN.beta))
    for share in (8 << i for i in range(12)):
        found = hierarchy(8, 4 * share, 1, nodes) - hierarchy(1, 4 * share, 1, nodes)
        assert found == min(closed_form(one, 8, share, 1, across) for one in ALGORITHMS["all_reduce"].values())


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_what_is_chosen_has_the_lowest_price(collective):
    for size in (2, 5, 8, 30):
        for length in (size << 5, size << 15):
            prices = {
                name: price(course(one, size, length), 4, CLUSTER) for name, one in ALGORITHMS[collective].items()
            }
            chosen = select(collective, size, length, 4)
            assert prices[chosen.name] == pytest.approx(min(prices.values()), rel=1e-3)


def test_short_arrays_take_few_steps_and_long_ones_send_little():
    assert [select("all_reduce", 5, length, 4).name for length in (1, 1 << 24)] == ["recursive_doubling", "ring"]
    assert [select("all_to_all", 8, length, 4).name for length in (8, 1 << 24)] == ["bruck", "pairwise"]
    assert [select("broadcast", 8, length, 4).name for length in (1, 1 << 26)] == ["tree", "chain"]


def test_what_needs_equal_blocks_is_not_chosen_without_them():
    assert select("all_to_all", 8, 8, 4, equal_blocks=False).name == "pairwise"


def test_another_machine_has_another_choice():
    slow = CLUSTER._replace(between=Link(1.0, 1e-10))
    assert select("all_reduce", 5, 1 << 20, 4).name != select("all_reduce", 5, 1 << 20, 4, slow).name
