"""The rendezvous: each rank of a host sends a hello and gets rank 0's reply with descriptors."""

import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest

from ringcomm import ArgumentError, CollectiveTimeout, MemoryShortage, PeerLost, RingcommError
from ringcomm.bootstrap import rendezvous as module
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.rendezvous import rendezvous
from ringcomm.bootstrap.store import HashStore, job_store
from ringcomm.bootstrap.wire import peers, unix


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = opened()
    yield
    assert opened() <= before  # less where the garbage of earlier tests has gone


def opened():
    return len(list(Path("/proc/self/fd").iterdir()))


def answer(hellos):
    fd = os.memfd_create("test")
    os.write(fd, json.dumps(hellos).encode())
    return {"names": [hello["name"] for hello in hellos]}, fd


def refuse_to_answer(_):
    raise AssertionError("called for nothing")


def join(store, rank, size, answer=answer, timeout=20, use=lambda result: None):
    hello, respond = {"name": f"rank {rank}"}, answer if rank == 0 else refuse_to_answer
    return rendezvous(store, rank, size, hello, respond, use, timeout)


def join_as_threads(ranks, size, answer=answer, timeout=20):
    """Return the Rendezvous or the error of every rank."""
    store = HashStore()

    def rank(number):
        try:
            return join(store, number, size, answer, timeout)
        except RingcommError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(rank, ranks))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_the_reply_and_the_same_file(size):
    for result in join_as_threads(range(size), size):
        with result:
            assert result.reply == {"names": [f"rank {rank}" for rank in range(size)]}
            assert result.pids == [os.getpid()] * size
            assert result.pidfds == [-1] * size  # no rank outlives its own process
            assert [hello["name"] for hello in json.loads(os.pread(result.fd, 1000, 0))] == result.reply["names"]
            assert fcntl.fcntl(result.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_closing_twice_closes_once():
    result = join(HashStore(), 0, 1)
    result.close()
    with open(os.devnull) as taken:  # probably reuses the number
        result.close()
        taken.read()


def test_more_descriptors_than_fit_one_message_arrive(monkeypatch):
    """Threads stand for processes here, and a message has room for 3 descriptors."""
    monkeypatch.setattr(module, "MAX_DESCRIPTORS", 3)
    monkeypatch.setattr(
        module._RendezvousServer,
        "_other_processes",
        lambda self, rank: [*{*range(self._size)} - {rank}],
    )
    size = 8
    for rank, result in enumerate(join_as_threads(range(size), size)):
        with result:
            assert [pidfd >= 0 for pidfd in result.pidfds] == [other != rank for other in range(size)]


def test_missing_ranks_are_named_on_every_rank():
    for error in join_as_threads([0, 2], 4, timeout=0.1):
        assert isinstance(error, CollectiveTimeout)
        assert str(error) == "timed out: ranks 1 and 3 of 4 did not arrive within 0.1 s"
        assert error.rank == 1


def test_the_rank_that_times_out_first_names_the_missing_rank():
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        server = pool.submit(join, store, 0, 3, timeout=20)
        client = pool.submit(join, store, 1, 3, timeout=0.1)
        for outcome in (server, client):
            with pytest.raises(CollectiveTimeout, match=r"rank 2 of 3 did not arrive within 0\.1 s"):
                outcome.result()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_rank_is_raised_on_every_rank(monkeypatch, failing):
    def fail(*_):
        raise MemoryShortage("no memory", rank=failing)

    send = module._RendezvousClient._send

    def fail_on_rank_1(client, message, *args):
        (fail if client._rank == 1 and "ready" in message else send)(client, message, *args)

    if failing == 1:
        monkeypatch.setattr(module._RendezvousClient, "_send", fail_on_rank_1)
    for error in join_as_threads(range(3), 3, answer if failing else fail):
        assert isinstance(error, MemoryShortage)
        assert (str(error), error.rank) == ("no memory", failing)


def test_a_rank_that_joins_late_raises_the_same_error(monkeypatch):
    store = HashStore()
    send = module._RendezvousClient._send

    def send_late_on_rank_2(client, *args):
        if client._rank == 2:
            server.exception()  # rank 0 has left
        send(client, *args)

    monkeypatch.setattr(module._RendezvousClient, "_send", send_late_on_rank_2)
    with ThreadPoolExecutor() as pool:
        server = pool.submit(join, store, 0, 4)
        late = pool.submit(join, store, 2, 4)
        early = pool.submit(join, store, 1, 4, timeout=0.1)
        for outcome in (server, early, late):
            with pytest.raises(CollectiveTimeout, match="did not arrive"):
                outcome.result()


def test_a_rank_that_fails_before_it_joins_ends_the_wait_of_the_others():
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(join, store, rank, 3) for rank in (0, 1)]
        store.abort(MemoryShortage("no memory", rank=2))
        for outcome in waiting:
            with pytest.raises(MemoryShortage, match="no memory"):
                outcome.result(timeout=10)


GARBAGE = (
    b"\xff\xfe",
    b"[1]",
    b"[" * 60_000,
    b"\xed\xa0\x80\0{}",
    b'guess\0{"rank": Infinity, "hello": {}}',
    rb'{"secret": "\ud800", "rank": 1, "hello": {}}',
    b"\0",
)


def test_untrusted_peers_are_refused_and_do_not_block_startup(caplog, monkeypatch):
    monkeypatch.setattr(peers, "INTERVAL", 0.0)  # log each
    store = HashStore()
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        server = pool.submit(join, store, 0, 2)
        name, _ = store.get(module.KEY, 20).split()

        def connect():
            peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            peer.settimeout(20)
            peer.connect(b"\0" + name)
            return peer

        connect()  # and send nothing
        connect().close()
        for garbage in GARBAGE:
            peer = connect()
            socket.send_fds(peer, [garbage], [0] * 253)  # rank 0 closes them
            assert peer.recv(100) == b""  # disconnected
        with join(store, 1, 2) as client, server.result():
            assert client.reply["names"] == ["rank 0", "rank 1"]
    assert caplog.text.count("it sent a wrong secret") == len(GARBAGE)
    assert caplog.text.count("it disconnected without sending anything") == 1


def test_two_processes_with_one_rank_fail_startup_on_all():
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        for outcome in [pool.submit(join, store, rank, 3) for rank in (0, 1, 1)]:
            with pytest.raises(ArgumentError, match=f"processes {os.getpid()} and {os.getpid()} both joined as rank 1"):
                outcome.result()


def test_a_send_is_repeated_while_too_many_descriptors_are_in_flight():
    class Busy:
        """A socket that refuses two calls: too many descriptors in flight."""

        sent: ClassVar = []

        def gettimeout(self):
            return 20

        def sendmsg(self, *message):
            self.sent.append(message)
            if len(self.sent) < 3:
                raise OSError(errno.ETOOMANYREFS, "too many references")

    unix.send_packet(Busy(), {"more": True}, [0])
    assert len(Busy.sent) == 3


def test_running_out_of_descriptors_is_an_error():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ours, theirs:
        unix.send_packet(ours, {}, [0, 0, 0])
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            with pytest.raises(RingcommError, match=r"rank 1 .*RLIMIT_NOFILE"):
                unix.receive_packet(theirs).read(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def join_as_process(job, rank, size):
    with job_store(Place(rank, size, job), 20) as store, join(store, rank, size) as result:
        assert result.pids[rank] == os.getpid()
        assert len(json.loads(os.pread(result.fd, 1000, 0))) == size
        for other, pidfd in enumerate(result.pidfds):
            if other == rank:
                assert pidfd == -1
            else:
                assert f"Pid:\t{result.pids[other]}\n" in Path(f"/proc/self/fdinfo/{pidfd}").read_text()
                assert fcntl.fcntl(pidfd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def die_after_the_hello(job, rank, size):
    module.receive_packet = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    join_as_process(job, rank, size)


def die_before_ready(job, rank, size):
    send = module.send_packet

    def die_instead_of_ready(peer, message, *args):
        if "ready" in message:
            os.kill(os.getpid(), signal.SIGKILL)
        send(peer, message, *args)

    module.send_packet = die_instead_of_ready
    join_as_process(job, rank, size)


@pytest.fixture
def start():
    """Start `function(job, rank, size)` of this module in a process of its own."""
    started = []

    def start(function, *args):
        code = f"import sys; sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]}; "
        code += f"import {Path(__file__).stem} as tests; tests.{function.__name__}(*{args!r})"
        started.append(subprocess.Popen([sys.executable, "-c", code]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_processes_get_pidfds_of_each_other(start):
    size, job = 3, uuid.uuid4().hex
    others = [start(join_as_process, job, rank, size) for rank in range(1, size)]
    with job_store(Place(0, size, job), 20) as store, join(store, 0, size) as result:
        assert result.pids == [os.getpid(), *(other.pid for other in others)]
        assert [other.wait(20) for other in others] == [0, 0]
        for pidfd in result.pidfds[1:]:
            assert select.select([pidfd], [], [], 0)[0], "the pidfd of an exited process is readable"


@pytest.mark.slow
@pytest.mark.parametrize("death", [die_after_the_hello, die_before_ready])
def test_a_process_that_dies_during_startup_is_named_on_every_rank(start, death):
    size, job = 3, uuid.uuid4().hex
    victim = start(death, job, 1, size)
    with (
        ThreadPoolExecutor() as pool,
        job_store(Place(0, size, job), 20) as store,
        job_store(Place(2, size, job), 20) as other_store,
    ):
        other = pool.submit(join, other_store, 2, size)
        for outcome in (pool.submit(join, store, 0, size), other):
            with pytest.raises(PeerLost, match=rf"rank 1 \(process {victim.pid}\) exited") as raised:
                outcome.result()
            assert raised.value.rank == 1
