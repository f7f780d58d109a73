"""What a start costs, by hand."""

import pytest

from ringcomm.bootstrap.start_cost import start_cost


def test_a_start_between_hosts_costs_its_server_its_facts_and_each_rank():
    cost = start_cost(hosts=79, local=128, connections=78, byte_time=1 / 125e6)
    assert cost.server == pytest.approx(10_112 * 0.27e-3)
    assert cost.facts == pytest.approx(10_112 * 90 * 78 / 125e6)  # the server's own host reads without the link
    assert cost.rank == pytest.approx(6.4e-3 + 0.13e-3 * (78 + 127))


def test_a_start_on_one_host_needs_no_link():
    cost = start_cost(hosts=1, local=64, connections=0, byte_time=1.0)
    assert cost == pytest.approx((64 * 0.07e-3, 0, 6.4e-3 + 0.13e-3 * 63))
