"""The session of the members of an elastic job: keys that go with who has set them (membership.py lists them).

set, delete             a value, which goes with the last member that has set it; keep: one that stays
keys                    → the keys that begin so
ended                   a rank has ended well: it comes to no start any more
"""

from collections import defaultdict
from collections.abc import Iterable

from ringcomm.bootstrap.session import BaseSession, Peer, Replies
from ringcomm.bootstrap.start_errors import lost_in_start
from ringcomm.bootstrap.wire.framing import Frame, encode
from ringcomm.errors import PeerLost

__all__ = ["MemberStore"]


class MemberStore(BaseSession):
    """A store for any number of members, which come and go. What a member has set goes with it.

    Watchers, the launchers of an elastic job, are told every change of a key.

    Attributes:
        connected: whether the ranks of any start have connected
        lost: ranks that come to no start: their connection or process has ended
    """

    def __init__(self) -> None:
        super().__init__()
        self.connected = False
        self.lost: dict[int, PeerLost] = {}
        self._watchers: set[Peer] = set()
        self._set_by: defaultdict[Peer, set[str]] = defaultdict(set)

    def join(self, peer: Peer, hello: Frame) -> Replies:
        replies = super().join(peer, hello)
        self.lost.pop(self.present[peer].rank, None)
        if hello.fields.get("watch"):
            self._watchers.add(peer)
            replies += [(peer, encode("changed", value, key=key, set=True)) for key, value in self._values.items()]
        return replies

    def take(self, peer: Peer, message: Frame) -> Replies:
        if message.kind == "keys":
            begin = str(message.fields["begin"])
            found = [key for key in self._values if key.startswith(begin)]
            return [(peer, encode("keys", id=message.fields["id"], keys=found))]
        if message.kind == "ended":
            rank = int(message.fields["rank"])
            self.lost[rank] = PeerLost(f"rank {rank} ended with status 0 before it had started", rank=rank)
            return []
        if message.kind in ("set", "keep"):
            key = str(message.fields["key"])
            if message.kind == "set":
                self._set_by[peer].add(key)
            return self.set(key, message.payload)
        if message.kind == "delete":
            self._set_by[peer].discard(key := str(message.fields["key"]))
            return self._disown([key])
        return super().take(peer, message)

    def set(self, key: str, value: bytes) -> Replies:
        return [*self._tell_watchers(encode("changed", value, key=key, set=True)), *super().set(key, value)]

    def leave(self, peer: Peer) -> Replies:
        super().leave(peer)
        self._watchers.discard(peer)
        return self._disown(self._set_by.pop(peer, ()))

    def lose(self, peer: Peer, how: str) -> Replies:  # noqa: ARG002 (as of other sessions)
        lost = self.present.get(peer)
        replies = self.leave(peer)
        if lost and lost.rank >= 0 and all(lost.rank != each.rank for each in self.present.values()):
            self.lost[lost.rank] = lost_in_start(lost.rank, lost.process)
        return replies

    def _disown(self, keys: Iterable[str]) -> Replies:
        replies: Replies = []
        for key in keys:
            if not any(key in each for each in self._set_by.values()):
                self._values.pop(key, None)
                replies += self._tell_watchers(encode("changed", key=key, set=False))
        return replies

    def _tell_watchers(self, change: bytes) -> Replies:
        return [(watcher, change) for watcher in self._watchers]
