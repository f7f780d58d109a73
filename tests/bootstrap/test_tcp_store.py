"""The store over TCP: who is heard, and what its messages survive."""

import hmac
import os
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import harness
from cases.start_stores import check_works
from harness.failures import until
from harness.nodes import SECRET, StartClient, store_server
from ringcomm import ArgumentError, CollectiveTimeout, PeerLost
from ringcomm.bootstrap.client import Client
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.session import ALL, MEMBERS
from ringcomm.bootstrap.store import open_store
from ringcomm.bootstrap.wire import tcp
from ringcomm.bootstrap.wire.addresses import split_address
from ringcomm.bootstrap.wire.framing import LENGTH, MESSAGE_BYTES, MessageSocket, decode, encode
from ringcomm.bootstrap.wire.handshake import GREETING, REFUSED, client_handshake


@pytest.fixture
def address():
    with store_server() as address:
        yield address


def join(address, job, rank, size, secret=SECRET, timeout=20):
    return client_of(Place(rank, size, job, secret, store=address), timeout)


def client_of(place, timeout=20):
    return StartClient(find_endpoint(place), place.job, place, timeout)


def connect(address):
    peer = socket.create_connection(split_address(address), harness.OPERATION)
    greeting = read(peer)
    assert greeting.startswith(GREETING)
    return peer, greeting.removeprefix(GREETING)


def read(peer):
    """Return one message, or b"" when the connection is closed."""
    try:
        header = peer.recv(LENGTH.size, socket.MSG_WAITALL)
        return peer.recv(LENGTH.unpack(header)[0], socket.MSG_WAITALL) if header else b""
    except ConnectionResetError:
        return b""


def send(peer, message):
    peer.sendall(LENGTH.pack(len(message)) + message)


def test_a_wrong_secret_is_an_error_at_once_and_logged(address, job, caplog):
    with pytest.raises(ArgumentError, match=f"the store at {address} has another secret"):
        join(address, job, 0, 2, secret="another")
    refused = r"refused 127\.0\.0\.1 port \d+: it sent a wrong secret"
    until(lambda: re.search(refused, caplog.text), "the log")


def test_nothing_is_heard_before_the_proof(address, job):
    """Neither a request nor the server's own proof, sent back or for other challenges, makes a member."""
    with join(address, job, 0, 2) as store:
        peer, challenge = connect(address)
        mine = os.urandom(32)
        for answer in (
            encode("set", b"value", key="key"),
            b"",
            mine + hmac.digest(SECRET.encode(), b"server" + challenge + mine, "sha256"),
            mine + hmac.digest(SECRET.encode(), b"client" + os.urandom(32) + mine, "sha256"),
            mine + hmac.digest(b"", b"client" + challenge + mine, "sha256"),
        ):
            with peer:
                send(peer, answer)
                assert read(peer) == REFUSED
                assert read(peer) == b""
            peer, challenge = connect(address)
        peer.close()
        assert store.find("key") is None


@pytest.mark.parametrize("message", [b"x", b"{}", b"[]", b"5", encode("join"), encode("join", session="s", size=2)])
def test_who_knows_the_secret_and_sends_garbage_is_refused(address, job, message):
    with tcp.connect(address, SECRET.encode(), 20) as peer:
        peer.send(message)
        answer = decode(peer.recv(MESSAGE_BYTES))
        assert (answer.kind, answer.fields) == ("refused", {"reason": "malformed request"})
    with join(address, job, 0, 2) as store, join(address, job, 1, 2) as other:
        check_works(store, other)


def test_an_untrusted_peer_is_heard_up_to_the_length_of_a_proof(address):
    peer, _ = connect(address)
    with peer:
        peer.sendall(LENGTH.pack(65))
        assert read(peer) in (REFUSED, b"")


def test_a_silent_untrusted_peer_has_little_time(address, monkeypatch, caplog):
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT", 0.2)
    peer, _ = connect(address)
    with peer:
        peer.sendall(b"\0")  # which does not prolong it
        assert read(peer) == b""
    until(lambda: "no proof of the secret within 0.2 s" in caplog.text, "the log")


def test_untrusted_peers_hold_few_connections_and_keep_no_rank_out(address, job, monkeypatch):
    monkeypatch.setattr(tcp, "MAX_UNTRUSTED", 4)
    monkeypatch.setattr(tcp, "GRACE", 0.01)
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT", 1000.0)
    peers = [socket.create_connection(split_address(address), harness.OPERATION) for _ in range(50)]
    with join(address, job, 0, 2) as store, join(address, job, 1, 2) as other:
        check_works(store, other)
        for peer in peers[:-4]:
            read(peer)  # the greeting, if it came before the end
            assert read(peer) == b""
    for peer in peers:
        peer.close()


def test_ranks_that_come_together_are_accepted_one_after_another(address, monkeypatch, caplog):
    monkeypatch.setattr(tcp, "MAX_UNTRUSTED", 4)
    monkeypatch.setattr(tcp, "GRACE", 1000.0)
    peers = [MessageSocket(socket.create_connection(split_address(address), harness.OPERATION)) for _ in range(10)]
    for peer in peers:
        steps = client_handshake(SECRET.encode(), peer, None)
        next(steps)
        peer.send(steps.send(peer.recv(100)))
        with pytest.raises(StopIteration):  # it has ended well
            steps.send(peer.recv(100))
    for peer in peers:
        peer.close()
    assert "refused" not in caplog.text


@pytest.fixture
def impostor():
    """What listens in place of a store: `answer(peer)` is called with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = SimpleNamespace(address="{}:{}".format(*listener.getsockname()), answer=None)

        def serve():
            try:
                while True:
                    with listener.accept()[0] as peer:
                        found.answer(peer)
            except OSError:
                pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield found
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([b"HTTP/1.1 400"], "what listens there is no ringcomm server"),
        ([], "it closed the connection"),
        ([GREETING + bytes(32), bytes(32)], "does not know the secret"),
        ([GREETING + bytes(32)], "it closed the connection"),
    ],
)
def test_a_server_without_the_secret_is_not_joined(impostor, job, messages, reason):
    def answer(peer):
        for message in messages:
            send(peer, message)
            if message.startswith(GREETING):
                read(peer)

    impostor.answer = answer
    with pytest.raises(CollectiveTimeout, match=rf"{impostor.address}\) did not answer within 0.2 s \(.*{reason}"):
        join(impostor.address, job, 1, 2, timeout=0.2)


def test_an_attempt_that_the_deadline_cuts_short_hides_no_earlier_one(impostor, job):
    """The first connection is closed, the second one is never answered."""
    given_up = iter([lambda _: None])
    impostor.answer = lambda peer: next(given_up, lambda waiting: waiting.recv(1 << 16) and waiting.recv(1))(peer)
    with pytest.raises(CollectiveTimeout, match=r"did not answer within 0.2 s \(it closed the connection"):
        join(impostor.address, job, 1, 2, timeout=0.2)


def test_a_rank_joins_a_store_that_opens_later(job):
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*reserved.getsockname())
        text = rf"node 0 \({address}\) did not answer within 0.1 s \(Connection refused\)"
        with pytest.raises(CollectiveTimeout, match=text):
            join(address, job, 0, 2, timeout=0.1)


def test_a_message_that_comes_in_pieces_delays_nobody(address, job):
    with join(address, job, 0, 3) as store, join(address, job, 1, 3) as other, join(address, job, 2, 3) as slow:
        message = encode("all_gather", b"value", key="slow", id=0, rank=0, size=1, reads=ALL)
        framed = LENGTH.pack(len(message)) + message
        for number, piece in enumerate(framed):
            socket.socket.send(slow._socket, bytes([piece]))
            store.set(f"key {number}", bytes([piece]))
            assert other.find(f"key {number}", 20) == bytes([piece])
        assert store.find("slow", 20) == b"value"


def test_a_rank_that_dies_is_named_with_its_host(address, job):
    with join(address, job, 0, 2) as store:
        lost = join(address, job, 1, 2)
        lost._socket.close()
        text = rf"^rank 1 \(process {os.getpid()} on {os.uname().nodename}\) exited during startup$"
        with pytest.raises(PeerLost, match=text) as raised:
            store.find("key", 20)
        assert raised.value.rank == 1


def test_a_store_that_is_lost_is_named(job):
    with store_server() as address:
        store = join(address, job, 0, 2)
    with store as left, pytest.raises(PeerLost, match=rf"^the launcher of node 0 \({address}\) has ended$"):
        left.find("key", 20)


def test_starts_of_two_jobs_and_of_one_have_stores_of_their_own(address, job):
    for name in (job, f"{job} too"):
        for start in range(2):
            places = [Place(rank, 2, f"{name}#{start}", SECRET, store=address) for rank in range(2)]
            with client_of(places[0]) as store, client_of(places[1]) as other:
                assert store.find("key") is None
                check_works(other, store)


def test_the_store_of_the_members_has_what_is_to_be_kept_and_what_present_members_have_set(address, job):
    places = [Place(rank, 2, job, SECRET, store=address) for rank in (0, 1, 1)]  # one connects twice
    first, second, third = (Client(find_endpoint(place), MEMBERS, place, 20) for place in places)
    with third:
        with second:
            with first:
                first.tell("keep", b"for good", key="kept")
                first.set("here", b"")
                first.set("both", b"")
                second.set("both", b"")
                assert third.find("here", 20) == third.find("both", 20) == b""
            until(lambda: third.find("here") is None, "the key to go")
            assert third.find("both") == b""
        until(lambda: third.find("both") is None, "the key to go")
        assert third.find("kept") == b"for good"


def test_a_failed_start_stays_failed_for_ranks_that_come_later(address, job):
    with join(address, job, 0, 2) as store:
        store.abort(PeerLost("the reason"))
    with pytest.raises(PeerLost, match="the reason"):
        join(address, job, 1, 2)


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_the_address_may_be_a_name_or_of_ipv6(job, host):
    if host == "::1" and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 here")
    with store_server(host) as address, join(address, job, 0, 2) as store, join(address, job, 1, 2) as other:
        check_works(store, other)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_not_all_addresses_are_listened_at(host):
    with pytest.raises(ArgumentError, match="--master-addr: expected one address"), store_server(host):
        pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "x" * 64])
def test_a_name_without_an_address_is_an_error(job, host):
    with pytest.raises(ArgumentError, match=f"--master-addr: cannot find the address of '{host}'"), store_server(host):
        pass
    with pytest.raises(CollectiveTimeout, match=rf"{host}:1\) did not answer within"):
        join(f"{host}:1", job, 0, 2, timeout=0.1)


def test_open_store_finds_it_by_the_place(address, job):
    place = Place(1, 2, job, SECRET, "ringcomm run", hosts=True, store=address)
    with open_store(place, 20) as store:
        assert store.server == address
