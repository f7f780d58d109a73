"""Two hosts, one link, and mpirun across them: the namespaces of harness/hosts.py, then ringcomm on them."""

import re
import socket
import time

import numpy as np
import pytest

import harness
import ringcomm
from harness import leftovers, pools
from harness.failures import until
from harness.hosts import two_hosts, why_no_hosts, why_not
from harness.mpi_world import LIBRARIES
from ringcomm import CollectiveTimeout
from ringcomm.testing import check_rank

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

one_library = pytest.mark.parametrize("library", ["mpich"], indirect=True)  # where the library makes no difference
SIZE = 1 << 20
SEND = """
import sys, time
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
x = np.zeros(int(sys.argv[1]), np.uint8)
world.Barrier()
begin = time.monotonic()
world.Sendrecv_replace(x, 1 - world.rank, source=1 - world.rank)
if world.rank == 0:
    print(time.monotonic() - begin)
"""
STAY = """
import signal
from mpi4py import MPI

if MPI.COMM_WORLD.rank == 0:
    print("here", flush=True)
signal.pause()
"""


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request):
    pytest.importorskip("mpi4py")
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def program(tmp_path):
    def write(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return path

    return write


@one_library
def test_the_link_is_limited(library, program):
    with two_hosts("100mbit") as hosts:
        ended = hosts.mpirun(library, 1, program(SEND), 8 * SIZE)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) > 0.95 * (8 * SIZE * 8 / 100e6)  # the bucket lets 128 KB pass at once


@one_library
def test_a_failure_leaves_no_process_and_no_interface(library, program):
    def fail():
        with two_hosts() as hosts:
            job = hosts.start(library, 2, program(STAY))
            assert job.stdout.readline() == "here\n"
            raise ZeroDivisionError

    before = [*leftovers.processes()], socket.if_nameindex()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert ([*leftovers.processes()], socket.if_nameindex()) == before


def test_missing_programs_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert why_no_hosts.__wrapped__() == "not found: unshare, nsenter, ip, tc"


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
        return comm._transport.name, here._transport.name, comm.split(comm.rank % 2)._transport.name


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
    for connection in pool.connections:
        connection.send((reduce_until_it_fails, ()))
    until(
        lambda: all(host.bytes_sent() - before > 20 * SIZE for host, before in zip(hosts, sent, strict=True)),
        "calls over the link",
    )
    hosts.cut_link()
    for rank, connection in enumerate(pool.connections):
        assert connection.poll(harness.OPERATION), f"rank {rank} still waits"
        answer, failure = pools.receive(connection, rank)
        assert failure is None
        text, seconds = answer
        assert seconds < LIMIT + 2
        pattern = r"timed out: rank (.) waited .* in (.*?\)).*: .*?ranks? (\d(?:[\d, and]*\d)?)"
        waiting, words, late = re.match(pattern, text).groups()
        assert words == f"all_reduce(float64 x {SIZE // 8}, max)"
        assert {int(rank) // 2 for rank in re.findall(r"\d", late)} != {int(waiting) // 2}, text
