"""The cost model: costs by hand, closed forms against recordings, and the selection by cost."""

from itertools import count

import pytest

from ringcomm.algorithms import ALGORITHMS, record
from ringcomm.algorithms.closed_forms import CostTerm
from ringcomm.algorithms.cost import CLUSTER, Cluster, LinkCost, algorithm_cost, closed_form_cost, schedule_cost
from ringcomm.algorithms.schedule import Block, Lengths, Port, even
from ringcomm.algorithms.schedule_table import ScheduleTable
from ringcomm.algorithms.select import hierarchical_cost, select

# Whole numbers, so that sums are exact in any order. A message costs 100 and 3 per element within a node, 1000 and 5
# per element between nodes; reducing or copying an element costs 2.
INSIDE, BETWEEN, WORK = LinkCost(100, 3), LinkCost(1000, 5), 2
ALONE = Cluster(INSIDE, BETWEEN, WORK, ranks=1)  # one rank per node
TOGETHER = Cluster(INSIDE, BETWEEN, WORK, ranks=1000)

every = pytest.mark.parametrize(
    "algorithm", [one for found in ALGORITHMS.values() for one in found.values()], ids=lambda algorithm: algorithm.title
)


def table(algorithm, size, length):
    lengths = Lengths(even(length, size))
    return ScheduleTable(record.__wrapped__(algorithm, rank, size, lengths) for rank in range(size))


def length_for(algorithm, size):
    """Return a length that the algorithm divides evenly."""
    unit = size << size.bit_length()
    # A chain of k pieces takes n - 2 + k steps.
    pieces = lambda length: int(algorithm.steps(size, length)) - size + 2  # noqa: E731 (one expression)
    fits = (length for length in count(unit, unit) if algorithm.name != "chain" or length % pieces(length) == 0)
    return next(fits)


def recorded(*ranks):
    """Return the table of these ranks; each is a function of a port and a block of 10 elements."""
    schedules = []
    for rank, function in enumerate(ranks):
        port = Port(rank, len(ranks))
        function(port, port.scratch(10))
        schedules.append(port.schedule())
    return ScheduleTable(schedules)


def test_a_message_costs_its_link_and_its_reduction():
    pair = recorded(lambda port, block: port.send(block, 1), lambda port, block: port.recv(block, 0))
    assert schedule_cost(pair, 1, TOGETHER) == 100 + 3 * 10
    assert schedule_cost(pair, 1, ALONE) == 1000 + 5 * 10
    assert schedule_cost(pair, 4, ALONE) == 1000 + 5 * 40
    reducing = lambda port, block: port.recv(block, 0, operand=block)  # noqa: E731 (one expression)
    assert (
        schedule_cost(recorded(lambda port, block: port.send(block, 1), reducing), 1, TOGETHER) == 100 + 3 * 10 + 2 * 10
    )


def test_copies_cost_time_before_and_after_a_message():
    def copies(port, block):
        port.copy(block, port.scratch(10))
        port.copy(block, port.scratch(10))
        port.send(block, 1)
        port.copy(block, port.scratch(10))

    pair = recorded(copies, lambda port, block: port.recv(block, 0))
    assert schedule_cost(pair, 1, TOGETHER) == 2 * 20 + (100 + 3 * 10) + 2 * 10
    assert schedule_cost(recorded(lambda port, block: port.copy(block, port.scratch(10))), 1, TOGETHER) == 20


def test_the_halves_of_an_exchange_run_concurrently_and_a_transfer_waits_for_both_ranks():
    def exchanges(port, block):
        port.exchange(block, 1, port.scratch(5), 2)
        port.send(block, 1)

    def receives(port, block):
        port.recv(block, 0)
        port.recv(block, 0)

    def slow(port, block):
        port.copy(block, port.scratch(10))
        port.send(block.part(0, 5), 0)

    assert schedule_cost(recorded(exchanges, receives, slow), 1, TOGETHER) == (20 + 100 + 3 * 5) + 130


@pytest.mark.parametrize("receivers", [(2, 3), (2, 4), (4, 2)])
def test_concurrent_senders_share_the_link_of_their_node(receivers):
    """Nodes of two ranks; the receivers are on one node or on two."""

    def send(dest):
        return lambda port, block: port.send(block, dest)

    def receive(port, block):
        if port.rank in receivers:
            port.recv(block, receivers.index(port.rank))

    ranks = recorded(*map(send, receivers), *[receive] * 4)
    assert schedule_cost(ranks, 1, ALONE._replace(ranks=2)) == 1000 + 2 * 5 * 10
    assert schedule_cost(ranks, 1, ALONE) == 1000 + 5 * 10


def test_connections_that_carry_less_than_a_share_of_the_link_take_longer():
    """Nodes of two ranks, both of which send 10 elements: the link takes 2 * 5 per element."""
    send = [lambda port, block, dest=dest: port.send(block, dest) for dest in (2, 3)]
    receive = [lambda port, block, source=source: port.recv(block, source) for source in (0, 1)]
    nodes = ALONE._replace(ranks=2)
    for flow, expected in ((0, 10), (9, 10), (12, 12)):
        cluster = nodes._replace(flow_byte_time=flow)
        assert schedule_cost(recorded(*send, *receive), 1, cluster) == 1000 + expected * 10
        assert closed_form_cost([CostTerm(1, 10, span=4, senders=2)], 4, 1, cluster) == 1000 + expected * 10
    inside = recorded(send[0], lambda port, block: None, receive[0])
    assert schedule_cost(inside, 1, TOGETHER._replace(flow_byte_time=12)) == 100 + 3 * 10


def test_rails_together_carry_more_than_the_connections_of_one():
    """Two nodes, 80 elements: their link takes 5 per element, the connections of two ranks 20."""
    for rails, each in ((1, 20), (2, 20), (4, 4 * 5), (8, 8 * 5)):
        nodes = ALONE._replace(ranks=rails, flow_byte_time=20)
        inside = hierarchical_cost(1, 80, 1, nodes)
        share = 80 / rails
        halves = 2 * (1000 + each * share / 2) + 2 * share / 2
        doubling = 1000 + each * share + 2 * share + 2 * share
        assert hierarchical_cost(2, 80, 1, nodes) - inside == min(halves, doubling), f"{rails} rails"


def test_concurrent_receivers_share_the_link_of_their_node():
    receive = [lambda port, block, source=source: port.recv(block, source) for source in (2, 4)]
    send = [lambda port, block, dest=dest: port.send(block, dest) for dest in (0, 1)]
    idle = lambda port, block: None  # noqa: E731 (one expression)
    assert (
        schedule_cost(recorded(*receive, send[0], idle, send[1], idle), 1, ALONE._replace(ranks=2)) == 1000 + 2 * 5 * 10
    )


def test_the_two_directions_of_a_link_are_independent():
    swap = [lambda port, block, peer=peer: port.exchange(block, peer, Block(2, 10, 20), peer) for peer in (1, 0)]
    assert schedule_cost(recorded(*swap), 1, ALONE) == 1000 + 5 * 10


def test_a_rank_continues_when_the_longer_half_is_done():
    def exchanges(port, block):
        port.exchange(block, 1, port.scratch(5), 2)
        port.copy(block, port.scratch(10))

    receives = lambda port, block: port.recv(block, 0)  # noqa: E731 (one expression)
    sends = lambda port, block: port.send(block.part(0, 5), 0)  # noqa: E731 (one expression)
    assert schedule_cost(recorded(exchanges, receives, sends), 1, TOGETHER) == (100 + 3 * 10) + 2 * 10


def test_a_deadlock_has_no_cost():
    stuck = recorded(*[lambda port, block: port.send(block, 1 - port.rank)] * 2)
    with pytest.raises(AssertionError, match=r"deadlock: rank 0 \(step 0\) sends to 1, rank 1 "):
        schedule_cost(stuck, 1, ALONE)


@every
def test_closed_form_and_recording_agree_exactly(algorithm):
    for size in range(2, 65):
        length = length_for(algorithm, size)
        ranks = table(algorithm, size, length)
        for cluster in (ALONE, TOGETHER):
            expected = schedule_cost(ranks, 4, cluster)
            assert algorithm_cost(algorithm, size, length, 4, cluster) == expected, f"{size} ranks, {length} elements"


@every
def test_with_two_kinds_of_links_a_closed_form_is_an_upper_bound(algorithm):
    for size in (3, 6, 8, 10, 16, 24, 37, 64):
        length = length_for(algorithm, size)
        ranks = table(algorithm, size, length)
        for local in (2, 3, 4, 8):
            cluster = ALONE._replace(ranks=local)
            found, expected = algorithm_cost(algorithm, size, length, 4, cluster), schedule_cost(ranks, 4, cluster)
            assert found >= expected, f"{size} ranks in nodes of {local}"
            if size in (8, 16, 64) and local != 3 and algorithm.name != "chain":
                assert found == expected, f"{size} ranks in nodes of {local}: powers of two"


@every
def test_declared_steps_equal_those_of_the_closed_form(algorithm):
    for size in (2, 5, 64, 100_000):
        found = algorithm_cost(algorithm, size, 1, 1, Cluster(LinkCost(1, 0), LinkCost(1, 0), 0, ranks=1))
        assert found == algorithm.steps(size, 1), f"{size} ranks"


def test_a_cost_term_shares_its_link():
    nodes = ALONE._replace(ranks=4)
    three = CostTerm(3, 10, span=8, senders=2, work=7)
    assert closed_form_cost([three], 8, 1, nodes) == 3 * (1000 + 2 * 5 * 10 + 2 * 7)
    assert closed_form_cost([CostTerm(1, 10, span=8, senders=9)], 8, 1, nodes) == 1000 + 4 * 5 * 10
    assert closed_form_cost([CostTerm(1, 10, span=2, senders=9)], 8, 1, nodes) == 100 + 3 * 10
    assert closed_form_cost([CostTerm(1, 10, span=8, senders=9)], 4, 1, nodes) == 100 + 3 * 10
    assert closed_form_cost([CostTerm.of_work(10)], 8, 1, nodes) == 2 * 10


def test_the_hierarchy_is_the_sum_of_its_stages():
    nodes = ALONE._replace(ranks=4)  # 2 nodes: 8 ranks, 80 elements, a share of 20
    scatter = 100 + 3 * 60 + 2 * 60
    gather = 100 + 3 * 60
    # By halves: 10 elements in each direction, four ranks of a node concurrently, and a reduction.
    across = 2 * (1000 + 4 * 5 * 10) + 2 * 10
    doubling = 1000 + 4 * 5 * 20 + 2 * 20 + 2 * 20
    assert doubling < across
    assert hierarchical_cost(2, 80, 1, nodes) == scatter + doubling + gather
    assert hierarchical_cost(2, 80, 1, ALONE) == algorithm_cost(
        ALGORITHMS["all_reduce"]["recursive_doubling"], 2, 80, 1, ALONE
    )


def test_the_hierarchy_selects_the_cheapest_algorithm_between_nodes():
    nodes = ALONE._replace(ranks=4)
    across = ALONE._replace(inter_node=BETWEEN._replace(byte_time=4 * BETWEEN.byte_time))
    for share in (8 << i for i in range(12)):
        found = hierarchical_cost(8, 4 * share, 1, nodes) - hierarchical_cost(1, 4 * share, 1, nodes)
        assert found == min(algorithm_cost(one, 8, share, 1, across) for one in ALGORITHMS["all_reduce"].values())


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_the_selected_algorithm_has_the_lowest_cost(collective):
    for size in (2, 5, 8, 30):
        for length in (size << 5, size << 15):
            costs = {
                name: schedule_cost(table(one, size, length), 4, CLUSTER)
                for name, one in ALGORITHMS[collective].items()
            }
            chosen = select(collective, size, length, 4)
            assert costs[chosen.name] == pytest.approx(min(costs.values()), rel=1e-3)


def test_short_arrays_select_few_steps_and_long_arrays_few_bytes():
    assert [select("all_reduce", 5, length, 4).name for length in (1, 1 << 24)] == ["recursive_doubling", "ring"]
    assert [select("all_to_all", 8, length, 4).name for length in (8, 1 << 24)] == ["bruck", "pairwise"]
    assert [select("broadcast", 8, length, 4).name for length in (1, 1 << 26)] == ["tree", "chain"]


def test_an_algorithm_that_needs_equal_blocks_is_not_selected_without_them():
    assert select("all_to_all", 8, 8, 4, equal_blocks=False).name == "pairwise"


def test_the_selection_depends_on_the_cluster():
    slow = CLUSTER._replace(inter_node=LinkCost(1.0, 1e-10))
    assert select("all_reduce", 5, 1 << 20, 4).name != select("all_reduce", 5, 1 << 20, 4, slow).name


def test_over_a_slow_link_ranks_keep_their_peers_where_that_costs_about_as_much():
    gigabit = CLUSTER._replace(inter_node=LinkCost(20e-6, 1 / 0.117e9))
    long, short = 16 << 18, 1 << 12  # in a short one, two rounds more are 5 % of the time
    chosen = [select("all_reduce", 4, long, 4, gigabit, slow=slow).name for slow in (True, False)]
    assert chosen == ["ring", "halving_doubling"]
    assert select("all_reduce", 4, short, 4, gigabit, slow=True).name == "halving_doubling"
