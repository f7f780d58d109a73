"""What wires have in common: which group a message is for, also if that is not made yet, or has ended."""

import threading
from contextlib import suppress

from ringcomm.transports.blocks import Bytes
from ringcomm.transports.messages.group import Facts, MessageGroup

__all__ = ["Switch"]


class Switch:
    """The receiving half of a wire (ringcomm.transports.messages.group.Wire)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call as well
        self._groups: dict[str, MessageGroup] = {}
        self._early: list[tuple[str, int, Facts, Bytes]] = []  # for groups that are not made yet
        self._ended: set[str] = set()
        self._lost: dict[int, str] = {}

    def listen(self, group: str, listener: MessageGroup) -> None:
        while True:
            with self._lock:
                early = [message for message in self._early if message[0] == group]
                self._early = [message for message in self._early if message[0] != group]
                if not early:  # now, and not before, may others hand over what comes
                    self._groups[group] = listener
                    lost = dict(self._lost)
                    break
            for _, peer, facts, payload in early:
                listener.arrived(peer, facts, payload)
        for peer, reason in lost.items():
            listener.lost(peer, reason)

    def end(self, group: str) -> bool:
        """Take no more messages for a group; say whether it was the last."""
        with self._lock:
            self._groups.pop(group, None)
            self._ended.add(group)
            return not self._groups

    def hand_over(self, peer: int, facts: Facts, payload: Bytes) -> None:
        with self._lock:
            group = facts["group"]
            listener = self._groups.get(group)
            if listener is None:
                if group not in self._ended:
                    self._early.append((group, peer, facts, payload))
                return
        listener.arrived(peer, facts, payload)

    def interrupt(self, error: BaseException) -> None:
        """Break all groups: a signal has come in the middle of a message, which may be lost."""
        for listener in [*self._groups.values()]:
            listener.interrupted(error)

    def lose(self, peer: int, error: Exception) -> None:
        """Tell all groups that nothing more comes from a peer."""
        reason = str(error).splitlines()[0]
        with self._lock:
            self._lost.setdefault(peer, reason)
            listeners = list(self._groups.values())
        for listener in listeners:
            with suppress(Exception):
                listener.lost(peer, reason)
