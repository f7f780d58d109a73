"""Point-to-point between ranks that send messages: which message is for which receive."""

from typing import Any

from ringcomm.errors import MismatchError, RingcommError
from ringcomm.transports.blocks import KINDS, Bytes, Steps, view
from ringcomm.transports.messages.handles import Group, Queued, nothing
from ringcomm.transports.waits import Deadline

__all__ = ["Letters", "Posted"]


class Posted(Queued):
    """A receive that waits for its message. `peer` -1 takes one of any rank."""

    def __init__(self, group: Group, memory: Any, count: int, dtype: int, peer: int, tag: int, timeout: float) -> None:
        words = f"recv({KINDS[dtype]} x {count}, from {'any' if peer < 0 else peer}) with tag {tag}"
        super().__init__(group, words, nothing())
        self.deadline = Deadline(group.limit(timeout))
        self._memory, self._count, self._dtype, self._peer, self._tag = memory, count, dtype, peer, tag

    def wants(self, source: int, tag: int) -> bool:
        return tag == self._tag and self._peer in (-1, source)

    def take(self, source: int, count: int, dtype: int, payload: Bytes) -> None:
        """Be done, with what has come."""
        self.source = source
        if (count, dtype) == (self._count, self._dtype):
            view(self._memory, count, dtype)[:] = payload
            self.finish()
        else:
            sent, expected = f"{KINDS[dtype]} x {count}", f"{KINDS[self._dtype]} x {self._count}"
            text = f"rank {source} sent {sent}, but {self.words}"
            self.finish(MismatchError(text, rank=source, peer=source, expected=expected, got=sent))

    def _until_finished(self, timeout: float) -> Steps:
        deadline = self.deadline if timeout < 0 else min(self.deadline, Deadline(timeout), key=Deadline.left)
        return self._group.until(lambda: self.finished, deadline, self.words, self._missing)

    def _missing(self) -> list[int]:
        return [self._peer] if self._peer >= 0 else self._group.needed_for_any()


class Letters:
    """The messages that no receive has taken yet, and the receives that no message has come for. One of both is empty
    for each rank and tag.
    """

    def __init__(self) -> None:
        self._letters: list[tuple[int, int, int, int, Bytes]] = []  # source, tag, count, dtype, data
        self._posted: list[Posted] = []

    def __bool__(self) -> bool:
        return bool(self._posted)

    def deliver(self, source: int, tag: int, count: int, dtype: int, payload: Bytes) -> None:
        """Hand a message to the first receive that wants it, or keep it."""
        for i, posted in enumerate(self._posted):
            if posted.wants(source, tag):
                del self._posted[i]
                posted.take(source, count, dtype, payload)
                return
        self._letters.append((source, tag, count, dtype, payload))

    def post(self, posted: Posted) -> None:
        """Let a receive have the first message that it wants."""
        for i, (source, tag, count, dtype, payload) in enumerate(self._letters):
            if posted.wants(source, tag):
                del self._letters[i]
                posted.take(source, count, dtype, payload)
                return
        self._posted.append(posted)

    def overdue(self) -> list[Posted]:
        """Return the receives whose time is up."""
        return [posted for posted in self._posted if posted.deadline.passed()]

    def end(self, error: RingcommError) -> None:
        """End all receives that wait."""
        posted, self._posted = self._posted, []
        for each in posted:
            each.finish(error)
