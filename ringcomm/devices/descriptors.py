"""Memory of a GPU by file descriptors, which processes of one user pass to each other over an abstract Unix socket.

A process of this user gets the descriptor of memory if it knows the name of the memory: 128 random bits.
"""

import errno
import logging
import os
import secrets
import socket
import threading
import time

from ringcomm.bootstrap.wire.framing import close_in_children
from ringcomm.bootstrap.wire.unix import (
    DescriptorSocket,
    close_descriptors,
    connect,
    credentials,
    user_address,
)
from ringcomm.errors import RingcommError
from ringcomm.machine.threads import start_thread
from ringcomm.native import check, ffi, lib

__all__ = ["GpuDriver", "allocate", "close", "export", "open_exported"]

SECONDS = 10.0  # in which a process answers
PAUSE = 0.1  # seconds after a connection that could not be accepted
NAME_BYTES = 16

log = logging.getLogger("ringcomm")

GpuDriver = tuple[str, int, int]  # the library, the primary context and the ordinal of a GPU


def allocate(gpu: GpuDriver, size: int) -> int:
    """Return the address of memory for `export`. Raises MemoryShortage."""
    address = ffi.new("uint64_t *")
    check(lib.rc_virtual_allocate(*_arguments(gpu), size, address))
    return int(address[0])


def open_exported(gpu: GpuDriver, handle: str) -> int:
    """Return the address at which memory that another process has exported is mapped here. Raises OSError."""
    server, name, size = handle.split(":")
    address = ffi.new("uint64_t *")
    try:
        descriptors = _fetch(server, bytes.fromhex(name))
        try:
            check(lib.rc_virtual_open(*_arguments(gpu), descriptors[0], int(size), address))
        finally:
            close_descriptors(descriptors)
    except RingcommError as error:
        raise OSError(str(error)) from None
    return int(address[0])


def _fetch(server: str, name: bytes) -> list[int]:
    """Return the descriptor of a name. Raises OSError, or RingcommError if another user listens there."""
    with connect(f"\0{server}", SECONDS, DescriptorSocket) as peer:
        peer.send(name)
        peer.recv(1)
        if descriptors := peer.take_fds():
            return descriptors
        if peer.dropped:
            raise OSError(errno.EMFILE, "this process can take no more file descriptors")
    raise OSError("the process that owns the memory sends no descriptor of it")


def close(address: int) -> None:
    if _server is not None and _server.process == os.getpid():
        _server.forget(address)
    check(lib.rc_virtual_close(address))


def export(address: int) -> str:
    """Return a handle with which another process opens memory of `allocate`, as long as that is not closed."""
    global _server
    with _starting:
        if _server is None or _server.process != os.getpid():
            _server = _DescriptorServer()
    return _server.export(address)


def _arguments(gpu: GpuDriver) -> tuple[object, object, int]:
    library, context, ordinal = gpu
    return ffi.new("char[]", library.encode()), ffi.cast("void *", context), ordinal


class _DescriptorServer:
    """Answers with descriptors, on a thread for each connection, until the process ends."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._address = user_address(f"memory of {self.process} {secrets.token_hex(8)}")
        self._lock = threading.RLock()  # guards these; a destructor may free memory at any time
        self._names: dict[int, bytes] = {}  # by address
        self._addresses: dict[bytes, int] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        close_in_children(self._listener)
        self._listener.bind(self._address)
        self._listener.listen(1024)
        start_thread("ringcomm memory", self._serve)

    def export(self, address: int) -> str:
        descriptor, size = self._descriptor(address)
        os.close(descriptor)
        with self._lock:
            name = self._names.setdefault(address, secrets.token_bytes(NAME_BYTES))
            self._addresses[name] = address
        return f"{self._address[1:]}:{name.hex()}:{size}"

    def forget(self, address: int) -> None:
        with self._lock:
            self._addresses.pop(self._names.pop(address, b""), None)

    def _descriptor(self, address: int) -> tuple[int, int]:
        descriptor, size = ffi.new("int *"), ffi.new("uint64_t *")
        check(lib.rc_virtual_descriptor(address, descriptor, size))
        return descriptor[0], size[0]

    def _serve(self) -> None:
        warned = False
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # as of a process that has too many open files
                if not warned:
                    log.warning("a peer cannot open memory of this process for now: %s", error)
                warned = True
                time.sleep(PAUSE)
                continue
            warned = False
            try:
                if credentials(connection)[1] == os.geteuid():
                    # On its own thread: one that sends nothing delays no other.
                    start_thread("ringcomm memory", self._answer, connection)
                else:
                    connection.close()
            except (OSError, RingcommError) as error:
                connection.close()
                log.warning("a peer got no descriptor of memory of this process: %s", error)

    def _answer(self, connection: socket.socket) -> None:
        try:
            with DescriptorSocket(connection) as peer:
                peer.settimeout(SECONDS)
                self._send_descriptor(peer)
        except (OSError, RingcommError) as error:
            log.warning("a peer got no descriptor of memory of this process: %s", error)

    def _send_descriptor(self, peer: DescriptorSocket) -> None:
        name = peer.recv(NAME_BYTES)
        with self._lock:  # the memory is not freed meanwhile
            address = self._addresses.get(name)
            if address is None:
                return
            descriptor, _ = self._descriptor(address)
        try:
            peer.send_fds(b"1", [descriptor])
        finally:
            os.close(descriptor)


_server: _DescriptorServer | None = None
_starting = threading.Lock()
