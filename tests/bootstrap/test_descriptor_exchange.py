"""Each rank of a host sends a hello and gets rank 0's reply with descriptors."""

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

import pytest

from ringcomm import ArgumentError, CollectiveTimeout, MemoryShortage, PeerLost, RingcommError
from ringcomm.bootstrap import descriptor_exchange as module
from ringcomm.bootstrap.descriptor_exchange import exchange_descriptors
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.session import Contribution
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
    return exchange_descriptors(store, rank, size, hello, respond, use, timeout)


def join_as_threads(ranks, size, answer=answer, timeout=20):
    """Return the Exchanged or the error of every rank."""
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
        module._Server,
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

    gather = module.all_gather_facts

    def fail_on_rank_1(store, name, rank, *args, **options):
        return fail() if rank == 1 and name == module.READY else gather(store, name, rank, *args, **options)

    if failing == 1:
        monkeypatch.setattr(module, "all_gather_facts", fail_on_rank_1)
    for error in join_as_threads(range(3), 3, answer if failing else fail):
        assert isinstance(error, MemoryShortage)
        assert (str(error), error.rank) == ("no memory", failing)


def test_a_rank_that_joins_late_raises_the_same_error(monkeypatch):
    store = HashStore()
    connect = module._Client._connect

    def connect_late_on_rank_2(client, *args):
        if client._rank == 2:
            server.exception()  # rank 0 has left
        connect(client, *args)

    monkeypatch.setattr(module._Client, "_connect", connect_late_on_rank_2)
    with ThreadPoolExecutor() as pool:
        server = pool.submit(join, store, 0, 3, timeout=0.5)
        others = [pool.submit(join, store, rank, 3) for rank in (1, 2)]
        for outcome in (server, *others):
            with pytest.raises(CollectiveTimeout, match=r"rank 2 of 3 did not arrive within 0\.5 s"):
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
    b"\xed\xa0\x80 1",
    b"guess 1",
    b" 1",
    b"\0",
)


def test_untrusted_peers_are_refused_and_do_not_block_startup(caplog, monkeypatch):
    monkeypatch.setattr(peers, "INTERVAL", 0.0)  # log each
    store = HashStore()
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        server = pool.submit(join, store, 0, 2)
        # Rank 1 has said hello, and does not connect yet: rank 0 serves.
        hello = json.dumps({"hello": {"name": "rank 1"}}).encode()
        address = json.loads(store.all_gather(Contribution(module.HELLO, 1, 2, hello), 20))[0]["address"]

        def connect():
            return stack.enter_context(unix.connect(address, 20, unix.DescriptorSocket))

        connect()  # and send nothing
        connect().sendall(b"\0")  # half a message
        connect().close()
        for garbage in GARBAGE:
            peer = connect()
            peer.send_fds(garbage, [0] * 253)  # rank 0 closes them
            assert peer.recv(100) == b""  # disconnected
        with join(store, 1, 2) as client, server.result():
            assert client.reply["names"] == ["rank 0", "rank 1"]
    assert caplog.text.count("it sent a wrong secret") == len(GARBAGE)
    assert caplog.text.count("it disconnected without sending anything") == 1


def test_two_processes_with_one_rank_fail_startup_on_all():
    store = HashStore()
    hello = json.dumps({"hello": {"name": "rank 2"}}).encode()
    store.all_gather(Contribution(module.HELLO, 2, 3, hello), 0.0)  # rank 2 does not connect
    with ThreadPoolExecutor() as pool:
        for outcome in [pool.submit(join, store, rank, 3) for rank in (0, 1, 1)]:
            with pytest.raises(ArgumentError, match=f"processes {os.getpid()} and {os.getpid()} both joined as rank 1"):
                outcome.result()


def test_a_send_is_repeated_while_too_many_descriptors_are_in_flight():
    class Busy(unix.DescriptorSocket):
        """A socket that refuses two calls: too many descriptors in flight."""

        calls = 0

        def sendmsg(self, *message):
            self.calls += 1
            if self.calls < 3:
                raise OSError(errno.ETOOMANYREFS, "too many references")
            return super().sendmsg(*message)

    ours, theirs = socket.socketpair()
    with Busy(ours) as ours, unix.DescriptorSocket(theirs) as theirs:
        ours.settimeout(20)
        ours.send_fds(b"message", [0])
        assert (theirs.recv(100), len(theirs.fds), ours.calls) == (b"message", 1, 3)


def test_running_out_of_descriptors_is_an_error():
    store, limits = HashStore(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        closing(unix.UnixGate(address := f"\0{uuid.uuid4().hex}", "this test").listeners[0]) as listener,
        closing(module._Client(store, 2, 20, None, rank=1)) as client,
    ):
        client._connect(address, "secret")
        with unix.DescriptorSocket(listener.accept()[0]) as server:
            server.send_fds(b"{}", [0, 0, 0])
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
            try:
                with pytest.raises(RingcommError, match=r"rank 1 .*RLIMIT_NOFILE"):
                    client._receive()
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
    module._Client._receive = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    join_as_process(job, rank, size)


def die_before_ready(job, rank, size):
    gather = module.all_gather_facts

    def die_instead_of_ready(store, name, *args, **options):
        if name == module.READY:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(store, name, *args, **options)

    module.all_gather_facts = die_instead_of_ready
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
