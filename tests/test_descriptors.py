"""The meeting at which ranks of one host exchange hellos for a welcome and descriptors."""

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
from contextlib import ExitStack, closing
from pathlib import Path
from typing import ClassVar

import pytest

from ringcomm import ArgumentError, CollectiveTimeout, MemoryShortage, PeerLost, RingcommError
from ringcomm.place import Place
from ringcomm.store import HashStore, SocketStore
from ringcomm.transports import descriptors
from ringcomm.transports.descriptors import meet


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


def visit(store, rank, size, answer=answer, timeout=20):
    return meet(store, rank, size, {"name": f"rank {rank}"}, answer if rank == 0 else refuse_to_answer, timeout)


def meet_as_threads(ranks, size, answer=answer, timeout=20):
    """Return what every rank got: a Meeting or the error."""
    store = HashStore()

    def rank(number):
        try:
            return visit(store, number, size, answer, timeout)
        except RingcommError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(rank, ranks))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_the_welcome_and_the_same_file(size):
    for meeting in meet_as_threads(range(size), size):
        with meeting:
            assert meeting.welcome == {"names": [f"rank {rank}" for rank in range(size)]}
            assert meeting.pids == [os.getpid()] * size
            assert meeting.pidfds == [-1] * size  # nobody outlives its own process
            assert [hello["name"] for hello in json.loads(os.pread(meeting.fd, 1000, 0))] == meeting.welcome["names"]
            assert fcntl.fcntl(meeting.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_closing_twice_closes_once():
    meeting = visit(HashStore(), 0, 1)
    meeting.close()
    with open(os.devnull) as taken:  # probably the number that has become free
        meeting.close()
        taken.read()


def test_a_number_of_descriptors_beyond_one_message_arrives(monkeypatch):
    """More processes than a message has room for are rare: pretend that each thread is one, and a message is short."""
    monkeypatch.setattr(descriptors, "BATCH", 3)
    monkeypatch.setattr(descriptors._Host, "_others", lambda self, rank: [r for r in range(self._size) if r != rank])
    size = 8
    for rank, meeting in enumerate(meet_as_threads(range(size), size)):
        with meeting:
            assert [pidfd >= 0 for pidfd in meeting.pidfds] == [other != rank for other in range(size)]


def test_those_who_do_not_arrive_are_named_everywhere():
    for error in meet_as_threads([0, 2], 4, timeout=0.1):
        assert isinstance(error, CollectiveTimeout)
        assert str(error) == "ranks 1 and 3 of 4 did not arrive within 0.1 s"
        assert error.rank == 1


def test_a_rank_that_gives_up_first_is_told_who_is_missing():
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        host = pool.submit(visit, store, 0, 3, timeout=20)
        guest = pool.submit(visit, store, 1, 3, timeout=0.1)
        for outcome in (host, guest):
            with pytest.raises(CollectiveTimeout, match=r"rank 2 of 3 did not arrive within 0\.1 s"):
                outcome.result()


def test_what_rank_0_raises_is_raised_everywhere():
    def no_memory(_):
        raise MemoryShortage("no memory for 3 ranks", rank=0)

    for error in meet_as_threads(range(3), 3, no_memory):
        assert isinstance(error, MemoryShortage)
        assert (str(error), error.rank) == ("no memory for 3 ranks", 0)


def test_what_another_rank_raises_is_raised_everywhere(monkeypatch):
    say = descriptors._Guest._say

    def fail_on_rank_1(guest, message, *args):
        if guest._rank == 1 and "ready" in message:
            raise RingcommError("no room for descriptors", rank=1)
        say(guest, message, *args)

    monkeypatch.setattr(descriptors._Guest, "_say", fail_on_rank_1)
    for error in meet_as_threads(range(3), 3):
        assert type(error) is RingcommError
        assert (str(error), error.rank) == ("no room for descriptors", 1)


def test_a_missing_rank_0_is_a_timeout_of_the_store():
    with pytest.raises(CollectiveTimeout):
        visit(HashStore(), 1, 2, timeout=0.05)


def test_a_rank_that_has_not_said_hello_yet_is_told_the_reason_too(monkeypatch):
    store = HashStore()
    say = descriptors._Guest._say

    def say_late_on_rank_2(guest, *args):
        if guest._rank == 2:
            host.exception()  # it has gone
        say(guest, *args)

    monkeypatch.setattr(descriptors._Guest, "_say", say_late_on_rank_2)
    with ThreadPoolExecutor() as pool:
        host = pool.submit(visit, store, 0, 4)
        hesitant = pool.submit(visit, store, 2, 4)
        late = pool.submit(visit, store, 1, 4, timeout=0.1)
        for outcome in (host, late, hesitant):
            with pytest.raises(CollectiveTimeout, match="did not arrive"):
                outcome.result()


def test_a_rank_that_fails_before_it_comes_ends_the_wait_of_the_others():
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(visit, store, rank, 3) for rank in (0, 1)]
        store.abort(MemoryShortage("no memory", rank=2))
        for outcome in waiting:
            with pytest.raises(MemoryShortage, match="no memory"):
                outcome.result(timeout=10)


NONSENSE = (
    b"\xff\xfe",
    b"[1]",
    b"[" * 60_000,
    b"\xed\xa0\x80\0{}",
    b'guess\0{"rank": Infinity, "hello": {}}',
    rb'{"secret": "\ud800", "rank": 1, "hello": {}}',
    b"\0",
)


def test_strangers_are_refused_and_do_not_block_the_start(caplog):
    store = HashStore()
    with ThreadPoolExecutor() as pool, ExitStack() as strangers:
        host = pool.submit(visit, store, 0, 2)
        name, _ = store.get(descriptors.KEY, 20).split()

        def connect():
            stranger = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            stranger.settimeout(20)
            stranger.connect(b"\0" + name)
            return stranger

        connect()  # and say nothing
        connect().close()
        for words in NONSENSE:
            stranger = connect()
            socket.send_fds(stranger, [words], [0] * 253)  # more than a rank would send; and they do not stay open
            assert stranger.recv(100) == b""  # hung up
        with visit(store, 1, 2) as guest, host.result():
            assert guest.welcome["names"] == ["rank 0", "rank 1"]
    assert caplog.text.count("it does not know the secret of this start") == len(NONSENSE)
    assert caplog.text.count("it left without a word") == 1


def test_two_that_come_as_one_rank_end_the_start_for_all():
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        for outcome in [pool.submit(visit, store, rank, 3) for rank in (0, 1, 1)]:
            with pytest.raises(ArgumentError, match=f"two came as rank 1: processes {os.getpid()} and {os.getpid()}"):
                outcome.result()


def test_descriptors_wait_while_too_many_are_on_their_way():
    class Busy:
        """A socket whose user has so many descriptors in flight that two calls are refused."""

        sent: ClassVar = []

        def gettimeout(self):
            return 20

        def sendmsg(self, *message):
            self.sent.append(message)
            if len(self.sent) < 3:
                raise OSError(errno.ETOOMANYREFS, "too many references")

    descriptors._send(Busy(), {"more": True}, [0])
    assert len(Busy.sent) == 3


def test_a_process_out_of_descriptors_says_so():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ours, theirs:
        descriptors._send(ours, {}, [0, 0, 0])
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            with pytest.raises(RingcommError, match="RLIMIT_NOFILE"):
                descriptors._receive(theirs).read()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def visit_as_process(job, rank, size):
    with closing(SocketStore(Place(rank, size, job), 20)) as store, visit(store, rank, size) as meeting:
        assert meeting.pids[rank] == os.getpid()
        assert len(json.loads(os.pread(meeting.fd, 1000, 0))) == size
        for other, pidfd in enumerate(meeting.pidfds):
            if other == rank:
                assert pidfd == -1
            else:
                assert f"Pid:\t{meeting.pids[other]}\n" in Path(f"/proc/self/fdinfo/{pidfd}").read_text()
                assert fcntl.fcntl(pidfd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def die_when_hello_is_said(job, rank, size):
    descriptors._receive = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    visit_as_process(job, rank, size)


def die_when_all_is_received(job, rank, size):
    send = descriptors._send

    def die_instead_of_ready(peer, message, *args):
        if "ready" in message:
            os.kill(os.getpid(), signal.SIGKILL)
        send(peer, message, *args)

    descriptors._send = die_instead_of_ready
    visit_as_process(job, rank, size)


@pytest.fixture
def start():
    """Start `function(job, rank, size)` of this module in a process of its own."""
    started = []

    def start(function, *args):
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
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
    others = [start(visit_as_process, job, rank, size) for rank in range(1, size)]
    with closing(SocketStore(Place(0, size, job), 20)) as store, visit(store, 0, size) as meeting:
        assert meeting.pids == [os.getpid(), *(other.pid for other in others)]
        assert [other.wait(20) for other in others] == [0, 0]
        for pidfd in meeting.pidfds[1:]:
            assert select.select([pidfd], [], [], 0)[0], "the pidfd of a process that has ended can be read"


@pytest.mark.slow
@pytest.mark.parametrize("death", [die_when_hello_is_said, die_when_all_is_received])
def test_a_process_that_dies_during_the_start_is_named_everywhere(start, death):
    size, job = 3, uuid.uuid4().hex
    victim = start(death, job, 1, size)
    with (
        ThreadPoolExecutor() as pool,
        closing(SocketStore(Place(0, size, job), 20)) as store,
        closing(SocketStore(Place(2, size, job), 20)) as other_store,
    ):
        other = pool.submit(visit, other_store, 2, size)
        for outcome in (pool.submit(visit, store, 0, size), other):
            with pytest.raises(PeerLost, match=rf"rank 1 \(process {victim.pid}\) ended") as raised:
                outcome.result()
            assert raised.value.rank == 1
