"""Which ranks have failed by themselves, not by the failure of another one: they tell `ringcomm run`.

A rank that leaves its `with` block by an exception aborts the others, and these may exit before it.
"""

import secrets
import socket
from contextlib import suppress

from ringcomm.bootstrap.place import blame_address

__all__ = ["Blame", "take_blame"]


class Blame:
    """The end of the launcher. Any process may send here; what it says only decides which rank is named."""

    def __init__(self) -> None:
        self.name = f"ringcomm-run-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(f"\0{self.name}")
        self._ranks: set[bytes] = set()

    def takes(self, rank: int) -> bool:
        """Return whether this rank has said that it fails by itself."""
        with suppress(BlockingIOError):
            while True:
                self._ranks.add(self._socket.recv(16))
        return b"%d" % rank in self._ranks

    def close(self) -> None:
        self._socket.close()


def take_blame() -> None:
    """Tell the launcher, if it is `ringcomm run`, that this rank fails by itself."""
    rank, name = blame_address()
    if name:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            sender.sendto(rank.encode(), f"\0{name}")
