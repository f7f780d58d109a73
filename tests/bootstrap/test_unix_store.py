"""Who may join the store of a start on one host."""

import os
import socket
import subprocess
import sys
import time

import pytest

from cases.start_stores import check_works, join
from ringcomm import ArgumentError, RingcommError
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.session import ALL
from ringcomm.bootstrap.wire import peers
from ringcomm.bootstrap.wire.framing import HELLO_BYTES, LENGTH, MessageSocket, decode, encode
from ringcomm.bootstrap.wire.unix import user_address

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def connect(name):
    peer = MessageSocket(socket.socket(socket.AF_UNIX))
    peer.settimeout(10)
    peer.connect(name)
    return peer


def test_the_second_process_with_a_rank_is_refused(job, caplog):
    with join(job, 0, 3) as store, join(job, 1, 3):
        with pytest.raises(ArgumentError, match=f"rank 1 is already taken by process {os.getpid()}"):
            join(job, 1, 3)
        with pytest.raises(ArgumentError, match=f"rank 0 .* is already taken by process {os.getpid()}"):
            join(job, 0, 3)
        with join(job, 2, 3) as last:
            check_works(last, store)
    assert "rank 1 is already taken" in caplog.text


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (Place(1, 2, "", "guessed"), "wrong secret"),
        (Place(1, 2, "", ""), "wrong secret"),
        (Place(1, 3, "", "secret"), "expected a rank of 2, got rank 1 of 3"),
    ],
)
def test_a_rank_of_another_job_is_refused_and_startup_continues(job, caplog, place, reason):
    with join(job, 0, 2, "secret") as store:
        with pytest.raises(ArgumentError, match=reason):
            join(job, place.rank, place.size, place.secret)
        with join(job, 1, 2, "secret") as other:
            check_works(store, other)
    assert reason in caplog.text


def hello(job, rank, size, secret=""):
    return encode("join", session=job, rank=rank, size=size, members=[], process="a test", secret=secret)


def garbage(job):
    return (
        b"x",
        b"\xff\0" * 1000,
        b"[" * 60_000,
        b"[]",
        b'{"kind": "join"}',
        encode("join", session=job, rank=float("inf"), size=2, members=[], process="", secret=""),
        encode("join", session=job, rank=1, size=2, members=[0], process="", secret=""),
        hello(job, 1, 2, "\ud800"),
        hello(job, -1, 2),
        hello(job, 2, 2),
    )


def refused(peer):
    """Return whether the server has refused this peer, and disconnected."""
    return decode(peer.recv(1000)).kind == "refused" and peer.recv(1000) == b""


@pytest.mark.parametrize("secret", ["", "secret"])
def test_untrusted_peers_do_not_block_startup(job, caplog, monkeypatch, secret):
    monkeypatch.setattr(peers, "INTERVAL", 0.0)  # log each
    with join(job, 0, 2, secret) as store, connect(user_address(job)):
        for each in garbage(job):
            with connect(user_address(job)) as peer:
                peer.send(each)
                assert refused(peer)
        with join(job, 1, 2, secret) as other:
            check_works(other, store)
    assert caplog.text.count(f"refused process {os.getpid()}: ") == len(garbage(job))


@pytest.mark.parametrize(
    "request_of_rank",
    [
        b"garbage",
        encode("all_gather", id=0, key="key", rank=0),
        encode("all_gather", id=0, key="key", rank="no number", size=2, reads=ALL),
        encode("all_gather", id=0, key="key", rank=2, size=2, reads=ALL),
        encode("missing", id=0, key="key", size=1 << 60, reads=ALL),
        b'{"kind": "all_gather"',
        encode("get", id=0, key="key"),
        encode("get", key="key", wait=True),
        encode("abort", b"no error"),
        encode("sing"),
    ],
)
def test_garbage_from_a_rank_of_a_job_without_secret_does_not_stop_rank_0(job, caplog, request_of_rank):
    with join(job, 0, 3) as store, connect(user_address(job)) as peer, join(job, 1, 3) as other:
        peer.send(hello(job, 2, 3))
        assert decode(peer.recv(100)).kind == "joined"
        peer.send(request_of_rank)
        assert refused(peer)
        check_works(other, store)
    assert "malformed request" in caplog.text


def test_a_flood_of_refused_peers_is_a_few_lines(job, caplog):
    began = time.monotonic()
    with join(job, 0, 2, "secret"):
        for _ in range(100):
            with connect(user_address(job)) as peer:
                peer.send(hello(job, 1, 2, "guessed"))
                assert refused(peer)
    # The first, one each second, and the rest at the end.
    assert len(caplog.messages) <= 2 + time.monotonic() - began
    assert all("wrong secret for this job" in line for line in caplog.messages)


@pytest.fixture
def another_user():
    """Return a function that starts code of another user, with a socket `s` and the name of the store in `name`."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    begin = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "

    def start(job, code):
        command = [sys.executable, "-I", "-S", "-c", f"{begin}name = {user_address(job)!r}; {code}"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    return start


@pytest.mark.slow
def test_another_user_is_refused_and_startup_continues(job, caplog, another_user):
    said = hello(job, 1, 2)
    said = LENGTH.pack(len(said)) + said
    with join(job, 0, 2) as store:
        with another_user(job, f"s.connect(name); s.send({said!r}); print(s.recv(100))") as process:
            assert "joined" not in process.communicate(timeout=20)[0]
        with join(job, 1, 2) as other:
            check_works(other, store)
    assert "belongs to user 65534, not to user 0" in caplog.text


@pytest.mark.slow
def test_an_address_that_another_user_holds_is_not_trusted(job, another_user):
    with another_user(job, "s.bind(name); s.listen(); print('here', flush=True); sys.stdin.read()") as thief:
        thief.stdout.readline()
        with pytest.raises(RingcommError, match=r"process \d+ belongs to user 65534, not to user 0"):
            join(job, 1, 2)
        with pytest.raises(ArgumentError, match=f"already taken by process {thief.pid} of user 65534"):
            join(job, 0, 2)
        thief.stdin.close()


def test_a_peer_that_has_not_joined_cannot_send_much(job):
    with join(job, 0, 2), connect(user_address(job)) as peer:
        socket.socket.send(peer, LENGTH.pack(HELLO_BYTES + 1))
        assert peer.recv(1000) == b""  # disconnected
