"""Two hosts, one link, and mpirun across them: what two_hosts.py promises, with nothing but mpi4py; then ringcomm."""

import json
import os
import re
import socket
import time

import numpy as np
import pytest

import harness
import ringcomm
from failures import until
from mpi_world import LIBRARIES
from ringcomm import CollectiveTimeout
from ringcomm.testing import check_rank
from two_hosts import two_hosts, why_no_hosts, why_not

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

SIZE = 1 << 20
ALL_REDUCE = """
import json, os, socket, sys
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
x = np.full(int(sys.argv[1]) // 8, world.rank + 1.0)
world.Allreduce(MPI.IN_PLACE, x)
assert (x == world.size * (world.size + 1) / 2).all()
seen = world.gather([socket.gethostname(), MPI.Get_processor_name(), os.readlink("/proc/self/ns/net")])
if world.rank == 0:
    print(json.dumps(seen))
"""
# Calls until each rank was late once, which it says in a pipe: while the link is down, host B's output gets nowhere.
DEADLINES = """
import sys, time
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
calls, late, all_late = 0, np.zeros(1), np.zeros(1)
while all_late[0] < world.size:
    request, deadline = world.Iallreduce(late.copy(), all_late), time.monotonic() + 1
    while not request.Test():
        if not late[0] and time.monotonic() > deadline:
            late[0] = 1
            with open(sys.argv[1], "w") as pipe:
                print("rank", world.rank, "is late", file=pipe)
        time.sleep(0.001)
    calls += 1
    if world.rank == 0 and calls == 10:
        print("calling", flush=True)
"""
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


@pytest.fixture(params=LIBRARIES)
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


def test_ranks_on_two_hosts_reduce_over_the_link(library, program):
    with two_hosts() as hosts:
        ended = hosts.mpirun(library, 2, program(ALL_REDUCE), SIZE)
        sent = [host.bytes_sent() for host in hosts]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    names, processors, networks = zip(*json.loads(ended.stdout), strict=True)
    assert names == processors == ("host-a", "host-a", "host-b", "host-b")
    assert len({*networks, os.readlink("/proc/self/ns/net")}) == 3
    assert min(sent) >= SIZE  # each host needs what the other has


def test_a_call_gets_stuck_while_the_link_is_down_and_ends_when_it_is_up(library, program, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with two_hosts() as hosts, open(os.open(pipe, os.O_RDWR)) as lines:
        job = hosts.start(library, 1, program(DEADLINES), pipe)
        assert job.stdout.readline() == "calling\n"
        hosts.link(up=False)
        assert {lines.readline() for _ in range(2)} == {"rank 0 is late\n", "rank 1 is late\n"}
        hosts.link(up=True)
        assert job.wait(harness.OPERATION) == 0


def test_the_link_is_limited(library, program):
    with two_hosts("100mbit") as hosts:
        ended = hosts.mpirun(library, 1, program(SEND), 8 * SIZE)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) > 0.95 * (8 * SIZE * 8 / 100e6)  # the first 128 KB pass at once


def test_a_failure_leaves_nothing(library, program):
    def fail():
        with two_hosts() as hosts:
            job = hosts.start(library, 2, program(STAY))
            assert job.stdout.readline() == "here\n"
            raise ZeroDivisionError

    before = [*harness.processes()], socket.if_nameindex()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert ([*harness.processes()], socket.if_nameindex()) == before


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert why_no_hosts.__wrapped__() == "not found: unshare, nsenter, ip, tc"


@pytest.fixture(scope="module", autouse=True)
def without_pools():
    """End the pools: beside them Open MPI took 20 s, and up to 40, for what takes 4, though they do nothing."""
    harness.end_pools()


# --- ringcomm on two hosts, which it finds by itself ------------------------------------------------------------------

LIMIT = 1.0  # seconds


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


def test_ringcomm_keeps_its_contract_on_two_hosts(library):
    with two_hosts() as hosts:
        pool = hosts.pool(library, 2)
        assert pool.run(find_hosts, ()) == [("shm+mpi", "shm", "mpi")] * 4
        pool.run(keep_the_contract, ())


def test_every_rank_is_told_in_time_that_the_link_is_down(library):
    with two_hosts() as hosts:
        pool = hosts.pool(library, 2)
        for connection in pool.connections:
            connection.send((reduce_until_it_fails, ()))
        until(lambda: min(host.bytes_sent() for host in hosts) > 20 * SIZE, "calls over the link")
        hosts.link(up=False)
        for rank, connection in enumerate(pool.connections):
            assert connection.poll(harness.OPERATION), f"rank {rank} still waits"
            answer, failure = harness.receive(connection, rank)
            assert failure is None
            text, seconds = answer
            assert seconds < LIMIT + 2
            waiting, words, late = re.match(r"rank (.) waited .* in (.*?\)).*: .* ranks? (.*)", text).groups()
            assert words == f"all_reduce(float64 x {SIZE // 8}, max)"
            assert {int(rank) // 2 for rank in re.findall(r"\d", late)} != {int(waiting) // 2}, text
