"""What the tests of meshes share: connections that are checked, and a host that does not answer."""

import os
import socket
from contextlib import ExitStack, contextmanager

from harness.failures import until
from ringcomm.bootstrap.wire.addresses import Reach

TIMEOUT = 20.0
SECRET = b"secret"
LOCAL = "127.0.0.1"
REACH = Reach([LOCAL], [LOCAL])


HOSTS = "0011"  # its rails are connected: ranks 0 and 2, 1 and 3


def check_connected(meshes, pairs):
    """Check which pairs have a connection that nobody has taken, that each works, and close them."""
    with ExitStack() as opened:
        sockets = {
            (rank, other): opened.enter_context(socket.socket(fileno=peer.detach()))
            for rank, mesh in enumerate(meshes)
            for other, peer in mesh.take().items()
        }
        assert sockets.keys() == pairs
        assert not any(os.get_blocking(each.fileno()) for each in sockets.values())
        for (rank, other), connected in sockets.items():
            connected.send(bytes([rank, other]))
        for (rank, other), connected in sockets.items():
            connected.settimeout(TIMEOUT)
            assert connected.recv(10) == bytes([other, rank])  # and nothing of the handshake


def serve_until(meshes, done, what):
    def serve():
        for mesh in meshes:
            mesh.serve(0)
        return done()

    until(serve, what)


def await_end(peer):
    while peer.recv(1000):
        pass


@contextmanager
def free_port():
    """Yield a port of LOCAL that nobody gets who asks for any (see Job in harness/nodes.py)."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOCAL, 0))
        yield reserved.getsockname()[1]


@contextmanager
def unanswering_listener():
    """Yield the address of a listener whose queue is full: the kernel answers no further attempt to connect."""
    with ExitStack() as opened:
        silent = opened.enter_context(socket.create_server((LOCAL, 0), backlog=0))
        for _ in range(3):
            queued = opened.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(silent.getsockname())
        yield f"{LOCAL}:{silent.getsockname()[1]}"
