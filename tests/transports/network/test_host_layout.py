"""What follows from where the ranks of a group run."""

import pytest

from ringcomm.transports.network.host_layout import layout_of


@pytest.mark.parametrize(
    ("hosts", "cores", "early"),
    [
        ("01", [[0, 1]], False),
        ("01", [[0], [0]], True),  # one machine plays two hosts
        ("0011", [[0, 1, 2, 3]] * 2, True),  # a rank that waits mostly waits for the other host
        ("00", [[0, 1]] * 2, False),
        ("00", [[0]] * 2, True),
    ],
)
def test_waiting_ranks_leave_cores_early_that_others_of_their_host_need(hosts, cores, early):
    assert layout_of(0, hosts).yields_early(cores) is early
