"""An attempt to connect to another rank, or to ask it about a rank of its host: what is sent over a new connection.

The one that connects proves that it knows the secret of the rank that listens, sends its number, and waits until the
other has taken the connection, or answers what it knows.
"""

import math
import struct
from collections.abc import Generator

from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.handshake import MESSAGE_OF_HANDSHAKE, client_handshake
from ringcomm.bootstrap.wire.tls import TlsIdentity

__all__ = ["ACCEPTED", "CONNECTING", "HELLO", "Attempt", "secret_of"]

# The rank that connects; the one that it is about, mostly the one that listens; the number of the flow, or 0.
HELLO = struct.Struct("!III")
ACCEPTED, CONNECTING = b"accepted", b"connecting"  # the answers about itself; about another rank: see Search.end


class Attempt:
    """The connection `peer` of rank `own` to `target` on which the handshake has not ended.

    It is to connect to rank `about`, as flow number `flow` if that is not 0, or to ask about it. At `expires` it has
    failed.
    """

    def __init__(
        self,
        peer: MessageSocket,
        tls: TlsIdentity | None,
        secret: bytes,
        own: int,
        target: int,
        about: int,
        expires: float,
        flow: int = 0,
    ) -> None:
        self.target, self.about, self.flow, self.expires = target, about, flow, expires
        self._peer = peer
        self._steps = self._introduce(tls, secret_of(secret, target), own)
        next(self._steps)

    @property
    def connects(self) -> bool:
        """Whether this would become the connection of the two ranks."""
        return self.target == self.about and not self.flow

    def advance(self) -> bytes | None:
        """Read what has come, and go on; return the answer once it is there. Raises OSError if the attempt fails."""
        try:
            self._peer.send(self._steps.send(self._peer.recv(MESSAGE_OF_HANDSHAKE)))
        except StopIteration as answer:
            return bytes(answer.value)
        return None

    def _introduce(self, tls: TlsIdentity | None, secret: bytes, own: int) -> Generator[bytes, bytes, bytes]:
        yield from client_handshake(secret, self._peer, tls)
        if self.connects:
            self.expires = math.inf  # the other may take this connection, now or later
        answer = yield HELLO.pack(own, self.about, self.flow)
        if not answer:
            raise ConnectionResetError("it closed the connection")
        return answer


def secret_of(secret: bytes, rank: int) -> bytes:
    """Return what a connection to this rank of a mesh is authenticated by."""
    return secret + struct.pack("!I", rank)
