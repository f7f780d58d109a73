"""Point-to-point on the message transport: matches messages with receives by source and tag."""

from typing import Any

from ringcomm.errors import MismatchError, RingcommError
from ringcomm.transports.blocks import KINDS, Bytes, Steps, view
from ringcomm.transports.messages.call_queue import ProgressEngine, QueuedCall, no_steps
from ringcomm.transports.waits import Deadline

__all__ = ["MatchingQueues", "PostedReceive"]

NO_SEND = "no matching send from {}"


class PostedReceive(QueuedCall):
    """A receive that waits for its message. `peer` -1 takes one of any rank."""

    def __init__(
        self, engine: ProgressEngine, memory: Any, count: int, dtype: int, peer: int, tag: int, timeout: float
    ) -> None:
        description = f"recv({KINDS[dtype]} x {count}, from {'any' if peer < 0 else peer}) with tag {tag}"
        super().__init__(engine, description, no_steps())
        self.deadline = Deadline(engine.effective_timeout(timeout))
        self._memory, self._count, self._dtype, self._peer, self._tag = memory, count, dtype, peer, tag

    def matches(self, source: int, tag: int) -> bool:
        return tag == self._tag and self._peer in (-1, source)

    def complete(self, source: int, count: int, dtype: int, payload: Bytes) -> None:
        """Finish with this message."""
        self.source = source
        if (count, dtype) == (self._count, self._dtype):
            view(self._memory, count, dtype)[:] = payload
            self.finish()
        else:
            sent, expected = f"{KINDS[dtype]} x {count}", f"{KINDS[self._dtype]} x {self._count}"
            text = f"rank {source} sent {sent}, but {self.description}"
            self.finish(MismatchError(text, rank=source, peer=source, expected=expected, got=sent))

    def _until_finished(self, timeout: float) -> Steps:
        deadline = self.deadline if timeout < 0 else min(self.deadline, Deadline(timeout), key=Deadline.left)
        return self._engine.wait_until(lambda: self.finished, deadline, self.description, self._missing, NO_SEND)

    def _missing(self) -> list[int]:
        return [self._peer] if self._peer >= 0 else self._engine.missing_for_any()


class MatchingQueues:
    """The unexpected messages and the posted receives. For each rank and tag at least one of the two is empty."""

    def __init__(self) -> None:
        self._unexpected: list[tuple[int, int, int, int, Bytes]] = []  # source, tag, count, dtype, payload
        self._posted: list[PostedReceive] = []

    def __bool__(self) -> bool:
        return bool(self._posted)

    def deliver(self, source: int, tag: int, count: int, dtype: int, payload: Bytes) -> None:
        """Complete the first matching receive with a message, or keep the message."""
        for i, receive in enumerate(self._posted):
            if receive.matches(source, tag):
                del self._posted[i]
                receive.complete(source, count, dtype, payload)
                return
        self._unexpected.append((source, tag, count, dtype, payload))

    def post(self, receive: PostedReceive) -> None:
        """Complete a receive with the first matching message, or keep the receive."""
        for i, (source, tag, count, dtype, payload) in enumerate(self._unexpected):
            if receive.matches(source, tag):
                del self._unexpected[i]
                receive.complete(source, count, dtype, payload)
                return
        self._posted.append(receive)

    def expired(self) -> list[PostedReceive]:
        """Return the receives whose deadline has passed."""
        return [receive for receive in self._posted if receive.deadline.passed()]

    def fail_all(self, error: RingcommError) -> None:
        """End all posted receives with an error."""
        posted, self._posted = self._posted, []
        for receive in posted:
            receive.finish(error)
