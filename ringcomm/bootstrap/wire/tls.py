"""TLS between hosts: both ends of a connection show a certificate of the authority that RINGCOMM_TLS names."""

import errno
import os
from typing import Any

from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.errors import ArgumentError
from ringcomm.machine.files import check_private
from ringcomm.native import NULL, check, ffi, lib

__all__ = ["TlsFailure", "TlsIdentity", "find_identity", "take_over"]

SETTING = "tls (RINGCOMM_TLS)"


class TlsFailure(ConnectionError):
    """An end of the connection has no TLS, or refuses the certificate of the other."""


class TlsIdentity:
    """The certificate and the key of this process, and the authority of those of its peers: paths of PEM files.

    Raises ArgumentError if one cannot be used, or if others can read the key.
    """

    def __init__(self, certificate: str, key: str, authority: str) -> None:
        for path in (certificate, key, authority):
            try:
                with open(path, "rb") as file:
                    if path == key:
                        check_private(path, os.fstat(file.fileno()), "the key")
            except OSError as error:
                raise ArgumentError(f"{SETTING}: cannot read {path!r}: {error.strerror}") from None
        slot = ffi.new("rc_tls_identity **")
        try:
            check(lib.rc_tls_load(os.fsencode(certificate), os.fsencode(key), os.fsencode(authority), slot))
        except ArgumentError as error:
            raise ArgumentError(f"{SETTING}: {error}") from None
        self.handle = ffi.gc(slot[0], lib.rc_tls_unload)

    def secure(self, peer: MessageSocket, accepts: bool) -> None:
        """From now on send and receive through TLS. One end `accepts`; the other one begins."""
        peer.channel = TlsChannel(self.handle, peer.fileno(), accepts)


_identities: dict[str, TlsIdentity] = {}  # by the setting: one, whichever thread asks first


def find_identity(files: str | None) -> TlsIdentity | None:
    """Return the identity of a setting `tls`, or None without one."""
    if not files:
        return None
    return _identities.get(files) or _identities.setdefault(files, TlsIdentity(*files.split(",")))


class TlsChannel:
    """TLS on a connected socket. Its calls do not wait: they raise BlockingIOError, with EINPROGRESS before the end of
    the handshake, for which the socket has to be readable.
    """

    def __init__(self, identity: Any, socket: int, accepts: bool) -> None:
        slot = ffi.new("rc_tls **")
        check(lib.rc_tls_open(identity, socket, accepts, slot))
        self.handle = ffi.gc(slot[0], lib.rc_tls_free)
        self._moved, self._holds = ffi.new("int64_t *"), ffi.new("int *")

    def send(self, data: bytearray) -> int:
        check(lib.rc_tls_send(self.handle, ffi.from_buffer(data), len(data), self._moved))
        return self._result()

    def recv(self, count: int) -> bytes:
        data = ffi.new("char[]", count)
        check(lib.rc_tls_receive(self.handle, data, count, self._moved, self._holds))
        return bytes(ffi.buffer(data, self._result()))

    def holds_received(self) -> bool:
        """Return whether something can be received although the socket need not be readable."""
        return bool(self._holds[0])

    def _result(self) -> int:
        result = int(self._moved[0])
        if result == -errno.EPROTO:
            raise TlsFailure(ffi.string(lib.rc_tls_failure(self.handle)).decode())
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result


def take_over(peer: MessageSocket) -> tuple[int, Any]:
    """Return the descriptor of a connection, and its rc_tls or NULL; the caller owns both from now on."""
    tls = peer.channel.handle if peer.channel else NULL
    if tls:
        ffi.gc(tls, None)
    return peer.detach(), tls
