"""Refused peers are logged once a second at most for each kind of reason, however many there are."""

import errno
import os
import re
import socket
import uuid
from contextlib import closing, suppress
from types import SimpleNamespace

import pytest

from ringcomm import RingcommError
from ringcomm.bootstrap.wire import peers
from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.peers import PeerServer
from ringcomm.bootstrap.wire.unix import UnixGate


class RefusingServer(PeerServer):
    """Refuses every message."""

    def __init__(self):
        self.address = f"\0ringcomm-test-{uuid.uuid4().hex}"
        super().__init__(UnixGate(self.address, "this test"), lambda peer: self.refuse(peer, "wrong message"), rank=2)

    def refuse_processes(self, count):
        for _ in range(count):
            with MessageSocket(socket.socket(socket.AF_UNIX)) as peer:
                peer.connect(self.address)
                self.serve(0)  # accept it; one of another user is refused here
                with suppress(BrokenPipeError):
                    peer.send(b"garbage")
                self.serve(0)


@pytest.fixture
def server():
    with closing(RefusingServer()) as server:
        yield server


@pytest.fixture
def clock(monkeypatch):
    """The time in the log of refusals: `clock.now`."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(peers, "time", clock)
    return clock


@pytest.mark.parametrize(("uid", "reason"), [(0, "wrong message"), (1, "belongs to user")])
def test_the_first_is_logged_at_once_and_the_others_are_counted(server, clock, caplog, monkeypatch, uid, reason):
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + uid)
    for count, after, lines in ((50, 0.875, 1), (50, 0.125, 1), (0, 0.875, 2), (1, 0.125, 2), (0, 0.0, 3)):
        server.refuse_processes(count)
        server.serve(0)
        assert len(caplog.messages) == lines
        clock.now += after
    assert all(f"process {os.getpid()}" in line and reason in line for line in caplog.messages)
    assert [others(line) for line in caplog.messages] == [0, 98, 0]


def others(line):
    """Return how many other attempts a line counts."""
    counted = re.search(r" \(and (\d+) other attempts in the last second\)$", line)
    return int(counted[1]) if counted else 0


def test_the_line_comes_without_another_event(server, caplog, monkeypatch):
    monkeypatch.setattr(peers, "INTERVAL", 0.05)
    server.refuse_processes(3)
    while sum(1 + others(line) for line in caplog.messages) < 3:
        server.serve(None)


def test_closing_logs_the_rest(server, clock, caplog):
    server.refuse_processes(3)
    server.close()
    assert [others(line) for line in caplog.messages] == [0, 1]
    assert clock.now == 100.0


def test_a_flood_does_not_hide_another_reason(clock, caplog):
    refused = peers.RefusalLog()
    for pid in range(100):
        refused.add("a connection", f"process {pid} belongs to user {pid}, not to user 0")
        if pid == 50:
            refused.add("process 7", "wrong secret for this job")
    clock.now += 1
    refused.flush(clock.now)
    first, *lines = caplog.messages
    assert first.startswith("refused a connection: process 0 belongs")
    assert [others(line) for line in lines] == [98, 0]
    assert lines[1] == "refused process 7: wrong secret for this job"


@pytest.mark.parametrize("reason", [errno.EMFILE, errno.ENOMEM, errno.ENOBUFS])
def test_a_peer_that_cannot_be_accepted_is_an_error_once(server, reason):
    class Refused:
        def __init__(self, listener):
            self.fileno = listener.fileno

        def accept(self):
            raise OSError(reason, os.strerror(reason))

    server._gate.listeners = [Refused(each) for each in server._gate.listeners]
    with MessageSocket(socket.socket(socket.AF_UNIX)) as peer:
        peer.connect(server.address)
        with pytest.raises(RingcommError, match=f"^rank 2 .*{os.strerror(reason)}"):
            server.serve(0)
        assert not server.serve(0)
