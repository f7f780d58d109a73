"""Memory of a GPU by file descriptors, which processes of one user pass to each other over an abstract Unix socket.

The descriptor of memory goes to whoever knows its name, which nobody can guess.
"""

import os
import secrets
import socket
import threading
from contextlib import suppress

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
NAME_BYTES = 16

GpuDriver = tuple[str, int, int]  # the library, the primary context and the ordinal of a GPU


def allocate(gpu: GpuDriver, size: int) -> int:
    """Return the address of memory for `export`. Raises MemoryShortage."""
    address = ffi.new("uint64_t *")
    check(lib.rc_virtual_allocate(*_arguments(gpu), size, address))
    return int(address[0])


def open_exported(gpu: GpuDriver, handle: str) -> int:
    """Return the address at which memory that another process has exported is mapped here. Raises OSError."""
    server, name, size = handle.split(":")
    with connect(f"\0{server}", SECONDS, DescriptorSocket) as peer:
        peer.send(bytes.fromhex(name))
        peer.recv(1)
        descriptors = peer.take_fds()
    if not descriptors:
        raise OSError("the process that owns the memory sends no descriptor of it")
    address = ffi.new("uint64_t *")
    try:
        check(lib.rc_virtual_open(*_arguments(gpu), descriptors[0], int(size), address))
    except RingcommError as error:
        raise OSError(str(error)) from None
    finally:
        close_descriptors(descriptors)
    return int(address[0])


def close(address: int) -> None:
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
    """Answers with descriptors, on a thread of its own, until the process ends."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._address = user_address(f"memory of {self.process} {secrets.token_hex(8)}")
        self._names: dict[bytes, int] = {}  # to addresses
        self._listener = socket.socket(socket.AF_UNIX)
        close_in_children(self._listener)
        self._listener.bind(self._address)
        self._listener.listen(1024)
        start_thread("ringcomm memory", self._serve)

    def export(self, address: int) -> str:
        descriptor, size = self._descriptor(address)
        os.close(descriptor)
        name = secrets.token_bytes(NAME_BYTES)
        self._names[name] = address
        return f"{self._address[1:]}:{name.hex()}:{size}"

    def _descriptor(self, address: int) -> tuple[int, int]:
        descriptor, size = ffi.new("int *"), ffi.new("uint64_t *")
        check(lib.rc_virtual_descriptor(address, descriptor, size))
        return descriptor[0], size[0]

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with suppress(OSError, RingcommError), DescriptorSocket(connection) as peer:
                peer.settimeout(SECONDS)
                self._answer(peer)

    def _answer(self, peer: DescriptorSocket) -> None:
        if credentials(peer)[1] != os.geteuid():
            return
        address = self._names.get(peer.recv(NAME_BYTES))
        if address is None:
            return
        descriptor, _ = self._descriptor(address)
        try:
            peer.send_fds(b"1", [descriptor])
        finally:
            os.close(descriptor)


_server: _DescriptorServer | None = None
_starting = threading.Lock()
