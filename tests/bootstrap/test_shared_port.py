"""The port that all servers of a process share, and those that RINGCOMM_PORT_RANGE leaves it."""

import errno
import os
import secrets
import socket
import threading
import time
from contextlib import ExitStack, closing

import pytest

from cases.meshes import LOCAL, TIMEOUT, free_port
from harness.failures import until
from ringcomm import ArgumentError, RingcommError
from ringcomm.bootstrap.wire import addresses, peers, shared_port, tcp
from ringcomm.bootstrap.wire.addresses import Reach, join_address, scoped_as, split_address
from ringcomm.bootstrap.wire.peers import PeerServer
from ringcomm.bootstrap.wire.shared_port import open_gate


@pytest.fixture
def reach():
    """One port at one address."""
    with free_port() as port:
        yield Reach([LOCAL], [LOCAL], range(port, port + 1))


class Echo(threading.Thread):
    """A server that answers with its name."""

    def __init__(self, reach, name, rank=0, needed=0):
        super().__init__()
        self.secret = secrets.token_bytes(32)
        self._said, self._over = name.encode(), False
        gate = open_gate(reach, name, self.secret, None, rank, needed)
        self.address = gate.addresses[0]
        self._server = PeerServer(gate, self._answer, rank)
        self.start()

    def run(self):
        while not self._over:
            self._server.serve(0.01)
        self._server.close()

    def close(self):
        self._over = True
        self.join()

    def _answer(self, peer):
        if peer.recv(100):
            self._server.send(peer, self._said)
        else:
            self._server.drop(peer)


def ask(server, secret=None):
    with tcp.connect(server.address, secret or server.secret, TIMEOUT) as peer:
        peer.send(b"?")
        return peer.recv(100)


def refuses(address):
    with socket.socket() as peer:
        return peer.connect_ex(split_address(address)) != 0


def test_the_secret_leads_to_one_of_the_servers_at_a_port(reach):
    with ExitStack() as opened:
        servers = [opened.enter_context(closing(Echo(reach, name))) for name in "abc"]
        assert {server.address for server in servers} == {join_address(LOCAL, reach.ports[0])}
        assert [ask(server) for server in servers for _ in range(3)] == [*[b"a"] * 3, *[b"b"] * 3, *[b"c"] * 3]
        servers.pop().close()
        assert [ask(server) for server in servers] == [b"a", b"b"]


def test_a_peer_without_the_secret_of_any_server_is_refused(reach, caplog):
    with closing(Echo(reach, "a")) as server:
        with pytest.raises(ArgumentError, match="has another secret"):
            ask(server, b"another")
        until(lambda: "refused 127.0.0.1 port" in caplog.text, "the refusal")
        assert ask(server) == b"a"


def test_nothing_listens_once_all_servers_are_closed(reach):
    with closing(Echo(reach, "a")) as server:
        pass

    until(lambda: refuses(server.address), "the port to close")


def test_a_port_that_closes_can_be_opened_again_at_once(reach):
    for _ in range(50):
        with closing(Echo(reach, "a")) as server:
            assert ask(server) == b"a"


def test_servers_come_and_go_while_others_are_asked(reach):
    def come_and_go():
        for _ in range(50):
            with closing(Echo(reach, "b")) as other:
                assert ask(other) == b"b"
        done.append(True)

    done = []
    with closing(Echo(reach, "a")) as server:
        threads = [threading.Thread(target=come_and_go) for _ in range(4)]
        for each in threads:
            each.start()
        while any(each.is_alive() for each in threads):
            assert ask(server) == b"a"
    assert len(done) == 4


def test_a_forked_child_does_not_hold_the_port(reach):
    release, wait = os.pipe()[::-1]
    with closing(Echo(reach, "a")):
        child = os.fork()
        if not child:
            os.close(release)
            os.read(wait, 1)
            os._exit(0)
    try:
        with closing(Echo(reach, "b")) as server:  # the child still runs
            assert ask(server) == b"b"
    finally:
        os.close(release)
        os.close(wait)
        assert os.waitpid(child, 0)[1] == 0


def test_a_port_that_is_in_use_is_left_out(reach):
    port = reach.ports[0]
    more = Reach([LOCAL], [LOCAL], range(port, port + 20))
    with socket.create_server((LOCAL, port)), closing(Echo(more, "a")) as server:
        assert split_address(server.address)[1] in more.ports[1:]
        assert ask(server) == b"a"


def test_a_port_that_is_in_use_for_a_moment_is_taken_then(reach, monkeypatch):
    held = socket.create_server((LOCAL, reach.ports[0]))
    monkeypatch.setattr(addresses.time, "sleep", lambda seconds: seconds and held.close())
    with closing(Echo(reach, "a")) as server:
        assert ask(server) == b"a"


@pytest.mark.parametrize(("then", "told"), [(errno.ECONNABORTED, 1), (0, 0)])
def test_that_no_descriptor_was_left_is_told_once_and_not_after_a_peer_was_accepted(reach, then, told, monkeypatch):
    def accept(listener, accept=socket.socket.accept):
        attempts.append(listener)
        if error := errno.EMFILE if len(attempts) <= 3 else then:
            raise OSError(error, os.strerror(error))
        return accept(listener)

    attempts = []
    monkeypatch.setattr(peers, "INTERVAL", 0.01)
    monkeypatch.setattr(peers.descriptors, "raise_limit", lambda: False)
    monkeypatch.setattr(socket.socket, "accept", accept)
    with ExitStack() as opened:
        gate = open_gate(reach, "a", b"secret", None, 0)
        server = opened.enter_context(closing(PeerServer(gate, lambda _: None, 0)))
        peer = opened.enter_context(socket.create_connection((LOCAL, reach.ports[0]), TIMEOUT))
        until(lambda: len(attempts) > 4 or (not then and peer.recv(1)), "the attempts to accept")
        for _ in range(told):
            with pytest.raises(RingcommError, match="no file descriptor left to accept another rank"):
                server.serve(TIMEOUT)
            time.sleep(0.02)  # until it accepts again
        for _ in range(8):
            server.serve(0.0)


def test_a_thread_that_fails_tells_the_servers_at_its_port(reach, monkeypatch):
    def fail(_, peer):
        peer.close()
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(shared_port._Entrance, "greet", fail)
    with ExitStack() as opened:
        gates = [open_gate(reach, name, name.encode(), None, 0) for name in "ab"]
        servers = [opened.enter_context(closing(PeerServer(gate, lambda _: None, 0))) for gate in gates]
        opened.enter_context(socket.create_connection((LOCAL, reach.ports[0]), TIMEOUT))
        for server in servers:
            with pytest.raises(RingcommError, match=r"nobody accepts connections at .* any more: by zero"):
                server.serve(TIMEOUT)


@pytest.mark.parametrize("served", [False, True])
def test_the_port_of_a_gate_that_nobody_has_closed_is_free(reach, served):
    gate = open_gate(reach, "a", b"secret", None, 0)
    server = PeerServer(gate, lambda _: None, 0) if served else None
    assert not refuses(gate.addresses[0])
    address = gate.addresses[0]
    del gate, server
    until(lambda: refuses(address), "the port to close")


@pytest.mark.parametrize(
    ("needed", "text"), [(4, "the 4 ranks of this host need one each"), (0, "each rank of a host needs one")]
)
def test_a_range_without_a_free_port_is_named_with_what_holds_it(reach, needed, text):
    port = reach.ports[0]
    with socket.create_server((LOCAL, port)), pytest.raises(ArgumentError) as raised:
        open_gate(reach, "rank 5", b"secret", None, 5, needed)
    expected = f"rank 5: no port of RINGCOMM_PORT_RANGE={port}-{port} is free at {LOCAL}: {text}; in use: {port} by "
    assert str(raised.value).startswith(f"{expected}process {os.getpid()} (")


def test_others_are_told_another_address_than_the_one_that_is_bound():
    reach = Reach(["192.0.2.1", "192.0.2.2"], ["0.0.0.0"])
    assert reach.addresses(["0.0.0.0:29500"]) == ["192.0.2.1:29500", "192.0.2.2:29500"]
    assert reach.sources == [""]
    reach = Reach(["192.0.2.1", "fd00::1"], ["10.0.0.1", "10.1.0.1"])
    assert reach.addresses(["10.0.0.1:1", "10.1.0.1:2"]) == ["192.0.2.1:1", "[fd00::1]:2"]


def test_all_addresses_are_bound_only_where_others_are_told_one():
    with pytest.raises(ArgumentError, match="rank 0: expected one address of this machine, not all, got"):
        open_gate(Reach(["0.0.0.0"], ["0.0.0.0"]), "rank 0", b"secret", None, 0)
    gate = open_gate(Reach([LOCAL], ["0.0.0.0"]), "rank 0", b"secret", None, 0)
    assert gate.addresses[0].startswith("0.0.0.0:")
    for listener in gate.listeners:
        listener.close()


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:5", ("10.0.0.1", 5)),
        ("[fd00::1]:5", ("fd00::1", 5)),
        ("fd00::1:5", ("fd00::1", 5)),
        ("[fe80::1%eth0]:5", ("fe80::1%eth0", 5)),
    ],
)
def test_addresses_of_both_families_are_split(address, parts):
    assert split_address(address) == parts
    assert split_address(join_address(*parts)) == parts


def test_a_link_local_address_has_the_interface_of_who_connects():
    assert scoped_as("[fe80::1%eth0]:5", lambda: "fe80::2%eth7") == "[fe80::1%eth7]:5"
    assert scoped_as("[fe80::1%eth0]:5", lambda: "fd00::2") == "[fe80::1%eth0]:5"
    assert scoped_as("[fd00::1]:5", lambda: "fe80::2%eth7") == "[fd00::1]:5"
