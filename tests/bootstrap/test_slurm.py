"""The lists of hosts and the ports of SLURM's steps."""

import pytest

from ringcomm import ArgumentError
from ringcomm.bootstrap.slurm import expand_hosts, step_port


# As `scontrol show hostnames` prints them.
@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("node1", "node1"),
        ("node[01-03,7],gpu1", "node01 node02 node03 node7 gpu1"),
        ("node[9-11]", "node9 node10 node11"),
        ("node[098-101]", "node098 node099 node100 node101"),
        ("b,a", "b a"),
        ("rack[0-1]node[1,3]", "rack0node1 rack0node3 rack1node1 rack1node3"),
        ("node[1-2].cluster.org,login", "node1.cluster.org node2.cluster.org login"),
        ("ip-10-0-0-[1-2]", "ip-10-0-0-1 ip-10-0-0-2"),
    ],
)
def test_a_list_of_hosts_is_expanded_in_order(hosts, names):
    assert expand_hosts(hosts) == names.split()


@pytest.mark.parametrize(
    "hosts",
    ["", ",", "a,", ",a", "a,,b", "node[1", "node1]", "node[]", "node[3-1]", "node[a-b]", "node[1-]", "node[[1]]"],
)
def test_a_malformed_list_is_refused(hosts):
    with pytest.raises(ArgumentError, match="SLURM_STEP_NODELIST: expected a list of hosts such as"):
        expand_hosts(hosts)


@pytest.mark.parametrize("hosts", ["n[0-99999999999]", "n[1-9999]m[1-9999]", "n[1-60000],m[1-60000]"])
def test_a_list_beyond_reason_is_refused_before_it_is_made(hosts):
    with pytest.raises(ArgumentError, match="at most 65536 hosts"):
        expand_hosts(hosts)


def test_the_steps_of_neighboring_jobs_have_ports_of_their_own():
    ports = [step_port(str(job), str(step)) for job in range(1000, 1100) for step in range(90)]
    assert len({*ports}) == len(ports)
    assert 20_000 <= min(ports) <= max(ports) < 30_000
    assert step_port("7", "4294967290") in range(20_000, 30_000)  # the step of an interactive shell
