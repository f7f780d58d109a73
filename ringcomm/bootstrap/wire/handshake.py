"""The handshake of a TCP connection: each end proves that it knows the secret of the job before it is heard.

    server → client    a greeting, a challenge
                       (from here on through TLS, if the greeting says so)
    client → server    a challenge, HMAC-SHA256(secret, "client", both challenges)
    server → client    HMAC-SHA256(secret, "server", both challenges), or "refused"

Without TLS nothing is encrypted, then or later. Whether there is TLS both ends know by themselves: if they differ, the
client says so, and both give up.
"""

import hmac
import secrets
from collections.abc import Collection, Generator
from contextlib import suppress

from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.tls import TlsFailure, TlsIdentity

__all__ = ["HANDSHAKE_TIMEOUT", "MESSAGE_OF_HANDSHAKE", "ServerHandshake", "WrongSecret", "client_handshake"]

HANDSHAKE_TIMEOUT = 5.0  # seconds for it
GREETING, TLS_GREETING = b"ringcomm store\n", b"ringcomm tls\n"
REFUSED, WANTS_TLS, NO_TLS = b"refused", b"wants TLS", b"no TLS"
CHALLENGE_BYTES, PROOF_BYTES = 32, 32
MESSAGE_OF_HANDSHAKE = CHALLENGE_BYTES + PROOF_BYTES  # bytes, at most


class WrongSecret(ConnectionError):
    """The server has refused the proof of this process."""


class ServerHandshake:
    """The server's part: send `greeting`, then (through TLS) answer what the client sends, who must prove one of the
    known secrets.

    `proved`: the one that the client has proved; b"" until then.
    """

    def __init__(self, known: Collection[bytes], tls: bool) -> None:
        self._known, self._challenge = known, secrets.token_bytes(CHALLENGE_BYTES)
        self.greeting = (TLS_GREETING if tls else GREETING) + self._challenge
        self.proved = b""

    def answer(self, message: bytes) -> tuple[bytes, str]:
        """Return the answer to the client's message, and why the client is refused, or an empty string."""
        theirs, proof = message[:CHALLENGE_BYTES], message[CHALLENGE_BYTES:]
        challenges = self._challenge + theirs
        for secret in [*self._known]:
            if hmac.compare_digest(proof, _proof(secret, b"client", challenges)):
                self.proved = secret
                return _proof(secret, b"server", challenges), ""
        if message == WANTS_TLS:
            return REFUSED, "RINGCOMM_TLS is set there, and not here"
        return REFUSED, "it sent a wrong secret" if proof else "it sent no secret"


def client_handshake(secret: bytes, peer: MessageSocket, tls: TlsIdentity | None) -> Generator[bytes, bytes, None]:
    """Take the client's part of the handshake: each yield gives a message for the server, after the first, and receives
    the one of the server that comes next.

    Raises TlsFailure if not both ends have TLS, or none, another ConnectionError if the server does not answer as it
    should.
    """
    greeting = _not_closed((yield b""))
    encrypts = greeting.startswith(TLS_GREETING)
    if not encrypts and not greeting.startswith(GREETING):
        raise ConnectionError("what listens there is no ringcomm server")
    if encrypts != bool(tls):
        with suppress(OSError):
            peer.send(WANTS_TLS if tls else NO_TLS)
        raise TlsFailure(
            "RINGCOMM_TLS is set here, and not there" if tls else "RINGCOMM_TLS is set there, and not here"
        )
    challenge = greeting.removeprefix(TLS_GREETING if tls else GREETING)
    if tls:
        tls.secure(peer, accepts=False)
    mine = secrets.token_bytes(CHALLENGE_BYTES)
    answer = _not_closed((yield mine + _proof(secret, b"client", challenge + mine)))
    if answer == REFUSED:
        raise WrongSecret("it has another secret than this process")
    if not hmac.compare_digest(answer, _proof(secret, b"server", challenge + mine)):
        raise ConnectionError("what listens there does not know the secret")


def _not_closed(message: bytes) -> bytes:
    if not message:
        raise ConnectionResetError("it closed the connection")
    return message


def _proof(secret: bytes, role: bytes, challenges: bytes) -> bytes:
    return hmac.digest(secret, role + challenges, "sha256")
