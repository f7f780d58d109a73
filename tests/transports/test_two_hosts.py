"""Two hosts, one link, and mpirun across them: the namespaces of harness/hosts.py, then ringcomm on them."""

import re
import time

import numpy as np
import pytest

import harness
import ringcomm
from harness import pools
from harness.failures import until
from harness.hosts import two_hosts, why_not
from harness.mpi_world import LIBRARIES
from ringcomm import CollectiveTimeout
from ringcomm.testing import check_rank

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

SIZE = 1 << 20


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request):
    pytest.importorskip("mpi4py")
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module", autouse=True)
def without_pools():
    """End the idle pools: while they ran, Open MPI took 20 to 40 s for a job of 4 s."""
    pools.end_pools()


# --- ringcomm on two hosts ------------------------------------------------------------------

LIMIT = 3.0  # seconds; the ranks share two cores with other tests, and no call before the cut may exceed it


def keep_the_contract(world):  # noqa: ARG001
    with ringcomm.init(timeout=harness.OPERATION) as comm:
        check_rank(lambda: comm.split(0))


def find_hosts(world):  # noqa: ARG001
    with ringcomm.init(timeout=harness.OPERATION) as comm, comm.split(comm.rank // 2) as here:
        return comm._router.name, here._router.name, comm.split(comm.rank % 2)._router.name


def reduce_until_it_fails(world):
    comm = ringcomm.init(timeout=LIMIT)
    x = np.full(SIZE // 8, world.rank + 1.0)
    while True:
        begin = time.monotonic()
        try:
            comm.all_reduce(x, "max")
        except CollectiveTimeout as error:
            return str(error), time.monotonic() - begin


@pytest.fixture(scope="module")
def world(library):
    """Two hosts, and two ranks on each; a test that cuts the link is the last one."""
    with two_hosts() as hosts:
        yield hosts, hosts.pool(library, 2)


def test_ringcomm_keeps_its_contract_on_two_hosts(world):
    _, pool = world
    assert pool.run(find_hosts, ()) == [("shm+mpi", "shm", "mpi")] * 4
    pool.run(keep_the_contract, ())


def test_every_rank_raises_a_timeout_when_the_link_is_down(world):
    hosts, pool = world
    sent = [host.bytes_sent() for host in hosts]
    pool.start(reduce_until_it_fails, ())
    until(
        lambda: all(host.bytes_sent() - before > 20 * SIZE for host, before in zip(hosts, sent, strict=True)),
        "calls over the link",
    )
    hosts.cut_link()
    for rank, connection in enumerate(pool.connections):
        assert connection.poll(harness.OPERATION), f"rank {rank} still waits"
        text, seconds = pool.receive(rank).value
        assert seconds < LIMIT + 2
        pattern = r"timed out: rank (.) waited .* in (.*?\)).*: .*?ranks? (\d(?:[\d, and]*\d)?)"
        waiting, words, late = re.match(pattern, text).groups()
        assert words == f"all_reduce(float64 x {SIZE // 8}, max)"
        assert {int(rank) // 2 for rank in re.findall(r"\d", late)} != {int(waiting) // 2}, text
