"""Keys with values, and the members of a session that wait for one."""

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from ringcomm.bootstrap.wire.framing import Frame, encode

__all__ = ["PRESENT", "KeyValues", "Peer", "Replies"]

PRESENT = ""  # a key that always has a value

Peer = Hashable
Replies = list[tuple[Peer, bytes]]


class Question(NamedTuple):
    number: int  # that of the member's message, which the answer repeats
    key: str


class KeyValues:
    """Keys with values, and the members that wait for one: each for one at a time."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {PRESENT: b""}
        self._waiting: dict[Peer, Question] = {}
        self._by_key: defaultdict[str, set[Peer]] = defaultdict(set)
        self._deadlines: list[tuple[float, int, Peer, int]] = []  # a heap, also of questions that were answered
        self._count = 0

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def items(self) -> Iterable[tuple[str, bytes]]:
        return self._values.items()

    def set(self, key: str, value: bytes) -> Replies:
        self._values[key] = value
        return [(peer, self._answer(peer, value)) for peer in list(self._by_key.get(key, ()))]

    def delete(self, key: str) -> None:
        self._values.pop(key, None)

    def ask(self, peer: Peer, message: Frame) -> Replies:
        number, key, seconds = message.fields["id"], str(message.fields["key"]), float(message.fields["timeout"])
        if not seconds >= 0:
            raise ValueError(seconds)
        self.forget(peer)
        self._waiting[peer] = Question(number, key)
        if key in self._values:
            return [(peer, self._answer(peer, self._values[key]))]
        self._by_key[key].add(peer)
        self._count += 1
        heapq.heappush(self._deadlines, (time.monotonic() + seconds, self._count, peer, number))
        return []

    def forget(self, peer: Peer) -> Question | None:
        question = self._waiting.pop(peer, None)
        if question and peer in (waiting := self._by_key.get(question.key, set())):
            waiting.remove(peer)
            if not waiting:
                del self._by_key[question.key]
        return question

    def due(self) -> float:
        while self._deadlines:
            when, _, peer, number = self._deadlines[0]
            if (question := self._waiting.get(peer)) and question.number == number:
                return when
            heapq.heappop(self._deadlines)
        return math.inf

    def overdue(self) -> list[tuple[Peer, Question]]:
        """Return the members whose time is over, with their questions, and forget these."""
        found = []
        while self.due() <= time.monotonic():
            peer = heapq.heappop(self._deadlines)[2]
            if question := self.forget(peer):
                found.append((peer, question))
        return found

    def all_waiting(self) -> list[tuple[Peer, Question]]:
        return [(peer, question) for peer in list(self._waiting) if (question := self.forget(peer))]

    def _answer(self, peer: Peer, value: bytes) -> bytes:
        question = self.forget(peer)
        assert question
        return encode("value", value, id=question.number)
