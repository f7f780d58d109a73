"""shrink between hosts: the launcher of node 0 decides who is left, and those connect anew."""

import os
import random
import re
import signal
import socket
import threading
import time
from contextlib import closing, suppress
from types import SimpleNamespace

import numpy as np
import pytest
import test_shrink as shrinking

from cases.between_hosts import run_on
from harness.failures import PROMPT, raised, survivors_of
from harness.nodes import SECRET, Job, finish, store_server
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, Config, PeerLost, RingcommError
from ringcomm.bootstrap.client import Client
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.shrink import Shrink
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.transports.network import survivors


def survivors_on(layout, fn, *args):
    return survivors_of(fn, layout, *args, launcher="nodes")


def test_survivors_connect_within_the_timeout_of_shrink():
    limits = []

    def connect(*arguments):
        limits.append(arguments[-1].start_limit)
        return SimpleNamespace(close=None)

    for timeout in (0.3, 3, 60):
        with store_server() as address:
            place = Place(0, 1, "job", SECRET, store=address)
            survivors.Survivors(place, Config(), connect).regroup("group", 0, 1, (), list, timeout)
    assert limits == [2, 3, 10]  # at least, that of shrink, at most


# --- Who is left ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        ("01", (0,)),
        ("0011", (0, 2)),
        ("0011", (2, 3)),  # the others share memory
        ("0011", (0, 1, 2)),
        ("012", (1,)),
    ],
)
def test_survivors_go_on_in_their_old_order(layout, victims):
    found, seconds = survivors_on(layout, shrinking.lose, victims)
    left = [rank for rank in range(len(layout)) if rank not in victims]
    assert found == {rank: (left.index(rank), len(left)) for rank in left}
    assert seconds < PROMPT


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["instead of its call", "in its call"])
def test_a_rank_that_dies_meanwhile_is_left_out(dies):
    found, seconds = survivors_on("00112", shrinking.lose_more, dies)
    assert found == {0: (0, 3), 2: (1, 3), 4: (2, 3)}
    assert seconds < PROMPT


def lose_one_that_connects(comm, how):
    """Rank 2 is lost once it was agreed on, before all are connected."""
    if comm.rank == 1:
        shrinking.die()
    shrinking.until_broken(comm)
    if comm.rank == 2 and how == "dies":
        survivors.job_store = lambda *_: shrinking.die()
    if comm.rank == 2 and how == "fails":
        group = comm._transport._network.survivors
        real = group._connect

        def fails(*_):
            group._connect = real
            raise CollectiveTimeout("it was stopped")

        group._connect = fails
    return shrinking.used(comm.shrink(), comm)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "left"), [("dies", [0, 3]), ("fails", [0, 2, 3])])
def test_if_one_is_lost_before_all_are_connected_the_others_agree_again(how, left):
    found, _ = survivors_on("0011", lose_one_that_connects, how)
    assert found == {rank: (left.index(rank), len(left)) for rank in left}


@pytest.mark.slow
def test_a_rank_that_does_not_come_in_time_is_left_out_and_told_so():
    found, _ = survivors_on("0011", shrinking.one_is_late)
    text = "rank 2 was left out: it called shrink when ranks 0 and 1 had continued without it"
    assert found == {0: (0, 2), 1: (1, 2), 2: (2, text)}


@pytest.mark.slow
def test_a_group_and_its_parent_each_go_on():
    found, _ = survivors_on("0011", shrinking.in_a_group)
    assert found == {0: (0, 3), 1: (1, 3), 3: (2, 3)}


def in_groups_of_one_number(comm):
    """Groups without a common process: their numbers are those that their own processes have not used."""
    group = comm.split(comm.rank % 2).split(0)
    members = group.all_gather_object(comm.rank)
    shrunk = group.shrink()
    assert shrunk.all_gather_object(comm.rank) == members
    return members


@pytest.mark.slow
def test_groups_of_one_number_are_not_mixed_up():
    found, _ = survivors_on("0011", in_groups_of_one_number)
    assert found == {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}


def interrupted_at_the_end(comm):
    """Rank 2 fails when all others are connected, and calls shrink again."""
    if comm.rank == 3:
        shrinking.die()
    shrinking.until_broken(comm)
    if comm.rank != 2:
        return shrinking.used(comm.shrink(), comm)
    await_connected = survivors.await_connected

    def interrupted(*arguments):
        await_connected(*arguments)
        raise KeyboardInterrupt

    survivors.await_connected = interrupted
    with suppress(KeyboardInterrupt):
        comm.shrink()
    survivors.await_connected = await_connected
    return str(raised(Aborted, comm.shrink))


@pytest.mark.slow
def test_a_rank_that_comes_again_after_the_others_have_gone_on_is_left_out():
    found, seconds = survivors_on("0011", interrupted_at_the_end)
    assert found[2] == "rank 2 was left out: it called shrink when ranks 0 and 1 had continued without it"
    assert seconds < 2 * PROMPT


def gives_up(comm):
    """Rank 2 is interrupted while the others wait for it, and does something else."""
    if comm.rank == 3:
        shrinking.die()
    shrinking.until_broken(comm)
    if comm.rank == 2:
        Client.receive = lambda *_: 1 / 0
        raised(ZeroDivisionError, comm.shrink)
        time.sleep(0.3)
        return None
    return shrinking.used(comm.shrink(timeout=60), comm)


@pytest.mark.slow
def test_nobody_waits_for_a_rank_that_gives_up():
    found, seconds = survivors_on("0011", gives_up)
    assert found == {0: (0, 2), 1: (1, 2), 2: None}
    assert seconds < PROMPT


def many_descriptors(comm):
    if comm.rank == 1:
        shrinking.die()
    shrinking.until_broken(comm)
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    result = shrinking.used(comm.shrink(), comm)
    for each in files:
        os.close(each)
    return result


@pytest.mark.slow
def test_a_process_may_have_more_descriptors_than_select_takes():
    assert survivors_on("01", many_descriptors)[0] == {0: (0, 1)}


@pytest.mark.slow
def test_pending_calls_end():
    found, seconds = survivors_on("011", shrinking.with_pending_calls)
    assert found == {0: (0, 2), 2: (1, 2)}
    assert seconds < PROMPT


@pytest.mark.slow
def test_an_aborted_communicator_goes_on_whole():
    assert survivors_on("0011", shrinking.abort_and_shrink)[0] == dict.fromkeys(range(4))


def test_without_the_launcher_it_is_refused():
    def shrink(comm):
        assert "start the ranks with ringcomm run --nnodes … --respawn N" in str(raised(ArgumentError, comm.shrink))
        comm.barrier()

    run_on("01", shrink)


# --- Without the launcher of node 0 -----------------------------------------------------------------------------------


def connect_one(address):
    """Connect rank 0 of 2, which waits 0.1 s for the other."""
    return survivors.connect_to_launcher(Place(0, 2, "job", SECRET, store=address), 0.1, KEEPALIVE)


def lost_launcher(address, why):
    return re.escape(f"the launcher of node 0 ({address}) {why}: without it shrink cannot tell who survives")


@pytest.fixture
def port():
    """A port at which nobody listens yet; its address."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        yield port, "{}:{}".format(*port.getsockname())


def test_a_launcher_that_has_ended_is_named_at_once(port):
    with pytest.raises(PeerLost, match=lost_launcher(port[1], "has ended")):
        connect_one(port[1])


def test_a_stopped_launcher_is_waited_for_no_longer_than_the_ranks(port, monkeypatch):
    monkeypatch.setattr("ringcomm.transports.network.survivors.ANSWER_TIMEOUT", 0.2)
    port[0].listen()
    with pytest.raises(CollectiveTimeout, match=lost_launcher(port[1], "did not answer within 0.3 s (timed out)")):
        connect_one(port[1])


def test_a_launcher_that_stops_later_is_waited_for_no_longer_than_the_ranks(monkeypatch):
    monkeypatch.setattr("ringcomm.transports.network.survivors.ANSWER_TIMEOUT", 0.2)
    monkeypatch.setattr(Shrink, "poll", lambda _: [])
    with store_server() as address, connect_one(address) as client:
        why = "did not answer within 0.3 s"
        with pytest.raises(CollectiveTimeout, match=lost_launcher(address, why)):
            survivors.agree(client, "group", 0, [0, 1], [], list, 0.1)


# --- Kills at random moments ------------------------------------------------------------------------------------------


def killed_at_random(comm, seed):
    """Use the communicator while ranks die; rank 0 of the job lives."""
    draw = random.Random(1000 * seed + comm.rank)
    if comm.rank and draw.random() < 0.7:
        threading.Timer(draw.uniform(0, 0.5), os.kill, (os.getpid(), signal.SIGKILL)).start()
    x, end = np.empty(1000), time.monotonic() + 0.8
    while True:
        try:
            x[:] = comm.rank + 1
            comm.all_reduce(x)
            assert (x == comm.size * (comm.size + 1) / 2).all()
            x[:] = time.monotonic() > end
            if comm.all_reduce(x, "max")[0]:
                return comm.size
        except RingcommError:
            comm = comm.shrink()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 300))])
def test_ranks_of_two_hosts_that_are_killed_at_random_moments(seed):
    found, _ = survivors_on("000111", killed_at_random, seed)
    assert 0 in found
    assert set(found.values()) == {len(found)}


# --- Under the launcher -----------------------------------------------------------------------------------------------


DIRECT = """
import ringcomm
comm = ringcomm.init(timeout=20)
if rank > 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        comm.barrier()
except ringcomm.RingcommError:
    comm = comm.shrink()
comm.barrier()
print(f"rank {comm.rank} of {comm.size}", flush=True)
"""
TORCH = """
import torch, torch.distributed as dist, ringcomm.torch
from ringcomm.torch import elastic
connect = elastic.TCPStore
def slow(*arguments, **options):
    time.sleep(0.5 * (rank == 2))
    return connect(*arguments, **options)
elastic.TCPStore = slow
ringcomm.torch.init_process_group(20)
if rank in (0, 3):
    os.kill(os.getpid(), signal.SIGKILL)
x = torch.ones(10)
try:
    while True:
        dist.all_reduce(x)
except ringcomm.RingcommError:
    ringcomm.torch.shrink()
x[:] = dist.get_rank() + 1
dist.all_reduce(x, group=dist.new_group())
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {x[0]:g}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("program", "ends"),
    [
        (DIRECT, [(0, ["[0] rank 0 of 2", "[1] rank 1 of 2"]), (137, [])]),
        (TORCH, [(0, ["[1] rank 0 of 2: 3"]), (0, ["[2] rank 1 of 2: 3"])]),
    ],
    ids=["without a node", "torch"],
)
def test_under_the_launcher_the_others_go_on(tmp_path, program, ends):
    with closing(Job(tmp_path, 2)) as job:
        nodes = [job.start(n, 2, job.program(program), "--respawn", "0", host_id=str(n)) for n in range(2)]
        for node, (status, lines) in zip(nodes, ends, strict=True):
            *found, err = finish(node)
            assert found == [status, lines], err


@pytest.mark.slow
def test_the_others_go_on_without_a_node_whose_launcher_is_lost(tmp_path):
    text = """
        import ringcomm
        comm = ringcomm.init(timeout=20)
        print("connected", flush=True)
        try:
            while True:
                comm.barrier()
        except ringcomm.RingcommError:
            comm = comm.shrink()
        for _ in range(20):
            comm.barrier()
            time.sleep(0.05)
        print(f"rank {comm.rank} of {comm.size}", flush=True)
        """
    with closing(Job(tmp_path, 2)) as job:
        first, second = (job.start(n, 1, job.program(text), "--respawn", "0", host_id=str(n)) for n in range(2))
        assert "connected" in second.stdout.readline()
        second.kill()
        status, lines, err = finish(first)
        assert (status, lines) == (0, ["[0] connected", "[0] rank 0 of 1"]), err
        assert ") has ended; the others continue without it" in err


@pytest.mark.slow
def test_a_rank_that_dies_before_all_have_started_ends_the_job(tmp_path):
    text = """
        import ringcomm
        if rank == 1:
            sys.exit(7)
        ringcomm.init(timeout=60)
        """
    with closing(Job(tmp_path, 2)) as job:
        nodes = [job.start(n, 1, job.program(text), "--respawn", "0", host_id=str(n)) for n in range(2)]
        assert [finish(node)[0] for node in nodes] == [7, 7]
