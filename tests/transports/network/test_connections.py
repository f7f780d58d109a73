"""Connections between ranks on several hosts: few at the start, more when two ranks need each other."""

import os
import re
import resource
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

import harness
import ringcomm
from cases.failures_between_hosts import SHORT, abort
from harness.failures import PROMPT, check_usable, outcomes, raised, until, until_broken
from ringcomm import CollectiveTimeout, PeerLost
from ringcomm.testing import check_rank
from ringcomm.transports.network.host_layout import layout_of

HOSTS = "0000111122223333"
MOST = 8  # descriptors of a rank besides one for each host, and one for each process of its own host
LARGE = 1 << 20  # elements


def opened():
    """Return what each descriptor of this process is open for."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of this list
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def connections():
    """Return the number of TCP connections of this process to others."""
    return sum(not listens for _, listens in tcp_sockets())


def tcp_sockets():
    for fd, what in opened().items():
        if not what.startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(fd)) as found:
            if found.family == socket.AF_INET and found.type == socket.SOCK_STREAM:
                yield found.getsockname(), found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def use_all(comm):
    for length in (1, 100_000):
        x = np.full(length, comm.rank + 1.0)
        comm.all_reduce(x)
        assert (x == comm.size * (comm.size + 1) / 2).all()


def start_again(comm):
    before = opened()
    with ringcomm.init(timeout=harness.OPERATION) as again:
        use_all(again)
        comm.barrier()
        of_start = [what for fd, what in opened().items() if fd not in before]
        comm.barrier()
    assert sum(listens for _, listens in tcp_sockets()) == 1  # that of `comm`
    return [what for what in of_start if what != "anon_inode:[pidfd]"]


def test_a_start_opens_few_descriptors():
    with harness.world(HOSTS, "nodes") as pool:
        for of_start in pool.run(start_again, ()):
            assert len(of_start) <= len({*HOSTS}) + MOST, of_start


@pytest.mark.parametrize("hosts", ["01", "0011", "0001", "0100", "012012", "0001112", HOSTS])
def test_each_rank_has_a_neighbor_on_every_other_host(hosts):
    layouts = [layout_of(rank, hosts) for rank in range(len(hosts))]
    for rank, layout in enumerate(layouts):
        neighbors = layout.neighbors()
        assert {hosts[other] for other in neighbors} == {*hosts} - {hosts[rank]}
        assert all(rank in layouts[other].neighbors() for other in neighbors)
        assert {*layout.rail} - {rank} <= {*neighbors}


def exchange(comm, pairs):
    """Exchange large messages between unconnected ranks, both of which send first; return the new connections."""
    use_all(comm)
    before = connections()
    comm.barrier()
    for pair in pairs:
        if comm.rank in pair:
            peer = pair[1 - pair.index(comm.rank)]
            x = np.empty(LARGE, np.int64)
            sends = [comm.send(np.arange(LARGE) + comm.rank, peer, tag=tag, async_op=True) for tag in range(3)]
            for tag in (2, 0, 1):
                comm.recv(x, peer, tag=tag)
                assert (x == np.arange(LARGE) + peer).all()
            for send in sends:
                send.wait()
    comm.barrier()
    return connections() - before


def test_a_message_connects_its_two_ranks_and_no_others():
    pairs = [(0, 15), (1, 6), (0, 9)]
    with harness.world(HOSTS, "nodes") as pool:
        found = pool.run(exchange, (pairs,))
    ranks = [rank for pair in pairs for rank in pair]
    assert found == [ranks.count(rank) for rank in range(len(HOSTS))]


def send_and_leave(comm):
    """Rank 0 is gone before rank 13 receives; what it has sent arrives all the same."""
    if comm.rank == 0:
        comm.send(np.arange(10), 13)
        comm.close()
    elif comm.rank == 13:
        x = np.zeros(10, int)
        comm.recv(x, 0)
        assert (x == np.arange(10)).all()


def test_a_message_arrives_although_its_sender_closes_at_once():
    with harness.world(HOSTS, "nodes") as pool:
        pool.run(send_and_leave, ())


def diagonal_of(comm):
    """Return the group of ranks 0, 5, 10 and 15, no two of which are connected."""
    return comm.split(0 if comm.rank % 5 == 0 else 1)


def use_groups(comm):
    with diagonal_of(comm) as group:
        use_all(group)
        x = np.arange(group.size, dtype=float) + group.rank
        y = np.empty_like(x)
        group.all_to_all(x, y)
        assert (y == np.arange(group.size) + group.rank).all()
    check_usable(comm)


def test_a_group_of_unconnected_ranks_connects_them():
    with harness.world(HOSTS, "nodes") as pool:
        pool.run(use_groups, ())


def abort_a_group(comm):
    group = diagonal_of(comm)
    if comm.rank % 5 == 0:
        return abort(group, 2, "all_reduce")
    check_usable(group)
    return None


def test_an_abort_reaches_a_group_of_unconnected_ranks():
    with harness.world(HOSTS, "nodes") as pool:
        texts = {text for text in pool.run(abort_a_group, ()) if text}
    assert len(texts) == 1


def keep_the_contract(comm):
    """In groups whose rails are not connected before."""
    check_rank(lambda: comm.split(0, key=7 * comm.rank % comm.size))


def test_ranks_that_connect_at_first_use_keep_the_contract():
    with harness.world(HOSTS, "nodes") as pool:
        pool.run(keep_the_contract, ())


# --- Peers that are gone ----------------------------------------------------------------------------------------------


def wait_for(comm, victim, how):
    if comm.rank == victim:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        comm.close()
        return None
    if comm.rank == 0:
        return str(raised(PeerLost, lambda: comm.recv(np.zeros(1), victim)))
    return str(until_broken(comm))


@pytest.mark.parametrize("how", ["dies", "closes"])
def test_a_lost_rank_is_named_by_all_although_few_are_connected_to_it(how):
    with harness.world(HOSTS, "nodes") as pool:
        answers, ends = {}, {}
        for rank, answer, when in outcomes(pool, wait_for, 15, how):
            answers[rank], ends[rank] = answer, when
    victim = answers.pop(15)
    assert how != "dies" or isinstance(victim, ConnectionError)
    for rank, text in answers.items():
        assert re.search(r"rank 15 (\(process \d+\) died|was lost|closed the communicator)", text), text
        assert ends[rank] - ends[15] < PROMPT


def outlive_closed_ranks(comm, closed, ends, folder):
    """Rank 0 is connected to none of them but rank 12; what they have closed concerns it not."""
    over = Path(folder, "over")
    if comm.rank in closed:
        comm.close()
        Path(folder, str(comm.rank)).touch()
        if ends:
            os._exit(0)
    elif comm.rank == 0:
        until(lambda: all(Path(folder, str(rank)).exists() for rank in closed), "the others")
        x = np.zeros(1)
        received = comm.recv(x, async_op=True)
        comm.send(np.ones(1), 14)
        until(lambda: {*closed} <= {*comm._transport.lost()}, "the end of the others")
        over.touch()
        assert received.wait() == 5
        assert x[0] == 5
        assert "rank 15 closed the communicator" in str(raised(PeerLost, lambda: comm.recv(x, 15)))
    elif comm.rank == 5:
        until(over.exists, "rank 0")
        comm.send(np.full(1, 5.0), 0)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("closed", [(13, 14, 15), (12, 13, 14, 15)])
def test_ranks_that_close_before_others_connect_to_them_are_not_lost(closed, ends, tmp_path):
    with harness.world(HOSTS, "nodes") as pool:
        for rank, answer, _ in outcomes(pool, outlive_closed_ranks, closed, ends, str(tmp_path)):
            if not (ends and rank in closed):
                assert answer is None, answer


def die_while_others_compute(comm, victim, over):
    """Only rank 0 makes a call; the others of the victim's host know what has become of it."""
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 0:
        text = str(raised(PeerLost, lambda: comm.recv(np.zeros(1))))
        Path(over).touch()
        return text
    until(Path(over).exists, "the end of rank 0's call")
    return None


def test_a_death_is_noticed_while_no_other_rank_makes_a_call(tmp_path):
    with harness.world(HOSTS, "nodes") as pool:
        pid = pool.processes[15].pid
        answers, ends = {}, {}
        for rank, answer, when in outcomes(pool, die_while_others_compute, 15, str(tmp_path / "over")):
            answers[rank], ends[rank] = answer, when
    assert f"rank 15 was lost (process {pid} died)" in answers[0]
    assert ends[0] - ends[15] < PROMPT


def wait_in_a_group_for_one_that_has_left(comm, over):
    """No two ranks of the group are connected, and its last one leaves the job without having called anything."""
    group = diagonal_of(comm)
    if comm.rank == 15:
        group.close()
        comm.close()
        Path(over).touch()
    elif comm.rank % 5 == 0:
        until(Path(over).exists, "the end of rank 15")
        return str(raised(PeerLost, group.barrier))
    return None


def test_a_rank_that_left_a_group_before_others_connected_to_it_is_named_there(tmp_path):
    with harness.world(HOSTS, "nodes") as pool:
        answers = pool.run(wait_in_a_group_for_one_that_has_left, (str(tmp_path / "over"),))
    for rank in (0, 5, 10):
        assert "rank 3 closed the communicator" in answers[rank]


def wait_for_a_stopped_rank(comm, victim, over):
    use_all(comm)
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        return str(until_broken(comm))
    if comm.rank == 0:
        text = str(raised(CollectiveTimeout, lambda: comm.recv(np.zeros(1), victim, timeout=SHORT)))
        Path(over).touch()
        return text
    return str(until_broken(comm))


def test_a_stopped_rank_is_named_in_time(tmp_path):
    over = tmp_path / "over"
    with harness.world(HOSTS, "nodes") as pool, ExitStack() as stopped:
        pid = pool.processes[15].pid
        stopped.callback(os.kill, pid, signal.SIGCONT)
        pool.start(wait_for_a_stopped_rank, (15, str(over)))
        until(over.exists, "the timeout of rank 0")
        stopped.close()
        texts = [pool.receive(rank).value for rank in range(len(HOSTS))]
    assert f"rank 0 waited {SHORT:g} s for recv(float64 x 1, from 15)" in texts[0]
    assert f"rank 15: process {pid} is stopped" in texts[0]
    assert texts == [texts[0]] * len(texts)


# --- Limits -----------------------------------------------------------------------------------------------------------


def use_up_descriptors(more):
    """Let this process open `more` descriptors, by raising its soft limit."""
    last = max(opened()) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (last, last + more))
    with suppress(OSError):
        while True:
            os.dup(0)


def exchange_at_the_soft_limit(comm):
    use_all(comm)
    if comm.rank in (3, 4):
        use_up_descriptors(10)
        out, peer = np.zeros(1), 7 - comm.rank
        comm.sendrecv(np.full(1, comm.rank + 1.0), peer, out, peer)
        assert out[0] == peer + 1


def test_the_soft_limit_on_descriptors_grows_with_the_connections():
    with harness.world("0000111122", "nodes") as pool:
        pool.run(exchange_at_the_soft_limit, ())


def send_at_the_hard_limit(comm):
    use_all(comm)
    if comm.rank == 3:
        use_up_descriptors(0)
        return str(raised(ringcomm.RingcommError, lambda: comm.recv(np.zeros(1), 4)))
    return str(until_broken(comm))


def test_a_rank_without_a_descriptor_for_a_connection_is_named_on_all_ranks_with_its_limit():
    with harness.world("0000111122", "nodes") as pool:
        texts = set(pool.run(send_at_the_hard_limit, ()))
    assert len(texts) == 1
    found = "rank 3 has no file descriptor left to connect to another rank (Too many open files): its limit"
    assert f"rank 3 cannot connect to other ranks any more: {found} (RLIMIT_NOFILE) is " in texts.pop()


# --- Strangers --------------------------------------------------------------------------------------------------------


def meet_strangers(comm):
    (address,) = [name for name, listens in tcp_sockets() if listens]
    with ExitStack() as opened_here:
        silent = opened_here.enter_context(socket.create_connection(address, harness.OPERATION))
        wrong = opened_here.enter_context(socket.create_connection(address, harness.OPERATION))
        wrong.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        with suppress(ConnectionError):
            while wrong.recv(1000):
                pass
        assert exchange(comm, [(3, 4)]) == (comm.rank in (3, 4))
        assert silent.recv(1000)  # the challenge, and nothing else


def test_strangers_at_the_port_of_a_rank_change_nothing():
    with harness.world("0000111122", "nodes") as pool:
        pool.run(meet_strangers, ())
