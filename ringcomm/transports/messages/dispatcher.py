"""Routes incoming messages to their groups, including groups not made yet and groups that have ended."""

import threading
from contextlib import suppress

from ringcomm.transports.blocks import Bytes
from ringcomm.transports.messages.group import Header, MessageGroup

__all__ = ["Dispatcher"]


class Dispatcher:
    """The receiving half of a link (ringcomm.transports.messages.group.Link)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call as well
        self._groups: dict[str, MessageGroup] = {}
        self._early: list[tuple[str, int, Header, Bytes]] = []  # for groups that are not made yet
        self._ended: set[str] = set()
        self._lost: dict[int, str] = {}

    def register(self, name: str, group: MessageGroup) -> None:
        while True:
            with self._lock:
                early = [message for message in self._early if message[0] == name]
                self._early = [message for message in self._early if message[0] != name]
                if not early:  # only now may other threads dispatch to it
                    self._groups[name] = group
                    lost = dict(self._lost)
                    break
            for _, peer, header, payload in early:
                group.message_arrived(peer, header, payload)
        for peer, reason in lost.items():
            group.peer_lost(peer, reason)

    def unregister(self, name: str) -> bool:
        """Drop later messages for a group; return whether it was the last group."""
        with self._lock:
            self._groups.pop(name, None)
            self._ended.add(name)
            return not self._groups

    def dispatch(self, peer: int, header: Header, payload: Bytes) -> None:
        with self._lock:
            name = header["group"]
            group = self._groups.get(name)
            if group is None:
                if name not in self._ended:
                    self._early.append((name, peer, header, payload))
                return
        group.message_arrived(peer, header, payload)

    def interrupt(self, error: BaseException) -> None:
        """Break all groups: a signal arrived in the middle of a message, which may be lost."""
        for group in [*self._groups.values()]:
            group.interrupted(error)

    def lose(self, peer: int, error: Exception) -> None:
        """Notify all groups that a peer will send nothing more."""
        reason = str(error).splitlines()[0]
        with self._lock:
            self._lost.setdefault(peer, reason)
            groups = list(self._groups.values())
        for group in groups:
            with suppress(Exception):
                group.peer_lost(peer, reason)
