"""Ranks that reach each other through MPI: messages, meetings, and the algorithms of ringcomm."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ringcomm.algorithms.schedule import NOBODY, Lengths, even
from ringcomm.algorithms.select import MPI, Choice
from ringcomm.transports.blocks import Blockwise, Bytes, Said, Steps
from ringcomm.transports.contract import Transport
from ringcomm.transports.messages.group import Facts, Membership
from ringcomm.transports.messages.transport import MessageTransport
from ringcomm.transports.mpi import handed
from ringcomm.transports.mpi.lane import Lane, Wait, combine
from ringcomm.transports.mpi.wire import MpiWire
from ringcomm.transports.waits import INFINITE, Deadline
from ringcomm.types import REDUCING, WHOLE, premul_sum, reduction

__all__ = ["MpiTransport"]

log = logging.getLogger("ringcomm")

ANSWER = 0.5  # seconds in which a rank says that it is there
SUM, AVG, PREMUL = (reduction(op)[0] for op in ("sum", "avg", premul_sum(1.0)))
MANY = 2**62  # numbers of calls: their negatives fit into 64 bits as well
MEETING = -1  # the phase of an exchange that names a mismatch
NOTHING = np.empty(0, np.uint8)


class MpiTransport(MessageTransport):
    """One rank's end of a group whose ranks reach each other through MPI.

    A collective begins with a meeting: every rank says what it calls, as a number. So no rank moves data before all
    have come and called the same. Then the schedule of an algorithm is carried out.
    """

    _wire: MpiWire

    def __init__(self, name: str, membership: Membership, lane: Lane, choice: Choice) -> None:
        self._lane, self._choice = lane, choice
        self._way = ("alone", 1)
        self._begun = 0  # the epoch of the last call that was begun
        self._reached: dict[int, tuple[int, str]] = {}  # rank → its last call, as it has said
        super().__init__(name, membership)

    def _part(self, group: int | None, rank: int) -> Any:
        return self._lane.split(group, rank, self.timeout)

    def _child(self, part: Any, membership: Membership) -> Transport:
        return type(self)(self.name, membership, part, self._choice)

    def way(self) -> tuple[str, int]:
        return self._way

    def _leave(self) -> None:
        if not self._failure:
            self._wire.free_with(self._group, self._lanes())
        super()._leave()

    def _lanes(self) -> list[Lane]:
        return [self._lane]

    def _steps(self, collective: str, *call: Any) -> Callable[[int], Steps]:
        if self._choice.name == MPI and collective in REDUCING:
            handed.refuse_unknown(call[3])
        return super()._steps(collective, *call)

    # --- The meeting --------------------------------------------------------------------------------------------------

    def _meet(self, said: Said, epoch: int, deadline: Deadline) -> Steps:
        self._begun = epoch
        number = (digest(said) + epoch) % MANY
        wait = partial(self._wait, said, epoch, deadline, "it was not called by")
        most = yield from self._lane.most(np.array([number, -number]), wait)
        if most[0] != number or -most[1] != number:
            yield from self._exchange(said, epoch, deadline, MEETING, [NOTHING] * self.size)  # raises

    def _wait(
        self, said: Said, epoch: int, deadline: Deadline, what: str, ready: Callable[[], bool], peers: Sequence[int]
    ) -> Steps:
        """Wait for peers. When the time is up, ask all ranks how far they are; `what` is said of those who are not."""

        def gone() -> list[int]:
            return [rank for rank in self._owing(sorted({*peers} - {NOBODY}), epoch) if rank in self._gone]

        words = f"{said.words} (epoch {epoch})"
        came = False

        def came_or(late: Deadline) -> Callable[[], bool]:
            def look() -> bool:
                nonlocal came
                came = came or ready()
                return came or late.passed()

            return look

        yield from self.until(came_or(deadline), Deadline(INFINITE), words, gone)
        if came:
            return
        self._reached = {self.rank: (epoch, self._flight.last(1))}
        self._say_to_all({"kind": "where?"})
        yield from self.until(came_or(Deadline(ANSWER)), Deadline(INFINITE), words, gone)
        if not came:
            with self.changed:
                answers = [self._reached.get(rank, (0, "no answer")) for rank in range(self.size)]
                late = [rank for rank, (theirs, _) in enumerate(answers) if theirs < epoch]
                self._late(
                    words, deadline, late, what, [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers)]
                )
            self._check()

    def arrived(self, wire_rank: int, facts: Facts, payload: Bytes) -> None:
        if facts["kind"] == "where?":
            self._say(
                self._members.index(wire_rank), {"kind": "here", "epoch": self._begun, "text": self._flight.last(1)}
            )
        elif facts["kind"] == "here":
            self._reached[self._members.index(wire_rank)] = facts["epoch"], facts["text"]
        super().arrived(wire_rank, facts, payload)

    # --- The data -----------------------------------------------------------------------------------------------------

    def _carry_out(self, call: Blockwise, epoch: int, deadline: Deadline) -> Steps:
        if self.size == 1:
            yield from super()._carry_out(call, epoch, deadline)
            return
        if call.name == "barrier":  # the meeting was one
            return
        wait = partial(self._wait, call.said, epoch, deadline, "in the middle of it this came to a stop:")
        if call.name == "all_to_all" and call.come is not call.rows:
            yield from self._compare_counts(call, epoch, wait)
        source, target = call.memory()
        reduces, op = call.name in REDUCING, call.op
        if reduces and op == PREMUL:
            scaled = target if call.name == "all_reduce" else np.empty_like(source)
            combine(scaled, [source], call.dtype, op, call.factor)
            source = scaled
        yield from self._move(call, source, target, SUM if reduces and op in (PREMUL, AVG) else op, wait, deadline)
        if reduces and op == AVG and target.size:
            combine(target, [target], call.dtype, AVG, self.size)

    def _move(
        self,
        call: Blockwise,
        source: Bytes,
        target: Bytes,
        op: int,
        wait: Wait,
        deadline: Deadline,  # noqa: ARG002
    ) -> Steps:
        """Move the data of a call; `op` is one that can be done in any number of steps."""
        if self._choice.name == MPI:
            self._way = MPI, 1
            return self._lane.handed(call, source, target, op, wait)
        whole = call.name in WHOLE
        counted = call.name == "all_to_all" and call.come is not call.rows
        rows = even(call.count, self.size) if whole else tuple(call.rows)
        lengths = Lengths(rows, tuple(call.come) if counted else ())
        algorithm = self._choice.of(call.name, self.size, lengths, call.item)
        self._way = algorithm.name, 1
        return self._lane.collective(algorithm, source, target, lengths, call.dtype, op, call.root, wait)

    def _compare_counts(self, call: Blockwise, epoch: int, wait: Wait) -> Steps:
        """Raise on every rank if one sends another what that does not expect."""
        table = yield from self._lane.rows(np.array([*call.rows, *call.come], np.int64), wait)
        sent, expected = table[:, : self.size], table[:, self.size :].T
        pairs: list[tuple[int, int]] = [(p, q) for p, q in np.argwhere(sent != expected).tolist()]
        if not pairs:
            return
        lines = [f"rank {p} sends {sent[p, q]} elements to rank {q}, which expects {expected[p, q]}" for p, q in pairs]
        p, q = next((pair for pair in reversed(pairs) if self.rank in pair), pairs[0])
        raise self._mismatch(call.said, epoch, q if p == self.rank else p, call.said, lines)


@lru_cache(maxsize=1024)
def digest(said: Said) -> int:
    return int.from_bytes(hashlib.blake2b(repr(said).encode(), digest_size=7).digest(), "big")
