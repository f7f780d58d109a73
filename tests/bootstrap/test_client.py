"""A member of a session, and the end of its connection."""

import errno
import socket
import threading
from dataclasses import replace

import pytest

from ringcomm import CollectiveTimeout, PeerLost
from ringcomm.bootstrap.client import Client
from ringcomm.bootstrap.endpoint import Endpoint, find_endpoint
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.server import serve_one_host
from ringcomm.bootstrap.session import Start
from ringcomm.bootstrap.wire import tcp
from ringcomm.bootstrap.wire.framing import MessageSocket, decode, encode


def test_a_client_leaves_also_if_the_server_reads_late():
    """Its last receive waited for nothing; `close` waits until there is room for its message."""
    ours, theirs = map(MessageSocket, socket.socketpair())
    with theirs:
        theirs.send(encode("joined"))
        client = Client(Endpoint("the server", lambda _: ours), "a session", Place(0, 1, "job"), 20)
        assert client.receive(None, 0.0) is None
        while ours.flush():
            ours.send(encode("set", bytes(1 << 16), key="key"))
        closing = threading.Thread(target=client.close)
        closing.start()
        join, *kept, last = [decode(message).kind for message in iter(lambda: theirs.recv(1 << 20), b"")]
    closing.join()
    assert (join, {*kept}, last) == ("join", {"set"}, "leave")


def test_a_server_that_does_not_answer_is_named_once_while_the_client_waits():
    said = []

    def refuse(_):
        raise ConnectionRefusedError(111, "Connection refused")

    with pytest.raises(CollectiveTimeout, match=r"within 0\.2 s \(Connection refused\)$"):
        Client(Endpoint("the server", refuse), "start", Place(0, 1, "job"), 0.2, late=said.append, late_after=0.0)
    assert [*map(str, said)] == ["timed out: the server did not answer within 0 s (Connection refused)"]


@pytest.mark.parametrize(
    ("error", "suspected"),
    [
        (TimeoutError("timed out"), True),
        (OSError(errno.EHOSTUNREACH, "No route to host"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), False),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), False),
    ],
)
def test_a_firewall_is_suspected_only_where_the_other_host_does_not_answer(error, suspected, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(ConnectionError) as failed:
        tcp.connect("10.0.0.1:29500", b"secret", 1)
    said = str(Endpoint("rank 0", tcp.connect, address="10.0.0.1:29500").silent(1, failed.value))
    reason = error.strerror or str(error)
    assert f"rank 0 did not answer within 1 s ({reason})" in said
    assert ("firewall" in said) == suspected


def test_no_firewall_is_suspected_where_rank_0_has_not_started():
    def look(_):
        raise ConnectionError("it has not started")

    with pytest.raises(CollectiveTimeout, match=r"within 0\.1 s \(it has not started\)$"):
        Client(Endpoint("rank 0", look, address="10.0.0.1:29500"), "start", Place(1, 2, "job"), 0.1)


def test_members_lose_their_server_at_once_if_its_thread_fails(monkeypatch):
    failures = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: failures.append(failure.exc_type))
    with serve_one_host(Place(0, 2, "job", "secret")) as first:
        clients = [Client(find_endpoint(first), "a start", replace(first, rank=rank), 20) for rank in range(2)]
        monkeypatch.setattr(Start, "poll", lambda _: 1 / 0)
        for client in clients:
            with client, pytest.raises(PeerLost, match=r"^the launcher has ended$"):
                client.find("key", 20)
    assert failures == [ZeroDivisionError]
