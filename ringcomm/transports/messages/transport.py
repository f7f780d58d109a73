"""A transport over messages, for ranks that share no memory: a wire takes them to other processes, also of other hosts.

Every collective is the same exchange: each rank tells each other what it calls, and sends with that what the other
needs. Whoever has heard from all compares, computes, and is done. So mismatches are named on every rank, and sums are
made in rank order and rounded once, as everywhere in ringcomm. Each rank sends n - 1 messages, a large all_reduce
2 (n - 1), of S / n bytes each.

What is sent is copied first, and what arrives has memory of its own: no wire ever touches the memory of a caller.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ringcomm.errors import ArgumentError, MemoryShortage, MismatchError, RingcommError, in_words, raise_told
from ringcomm.native import check, lib
from ringcomm.transports.blocks import Blockwise, Bytes, Said, Steps, view
from ringcomm.transports.contract import Fused, Pending, Transport
from ringcomm.transports.messages.group import Facts, Membership, MessageGroup
from ringcomm.transports.messages.handles import Queued, nothing
from ringcomm.transports.messages.letters import Posted
from ringcomm.transports.waits import Deadline
from ringcomm.types import COLLECTIVES

__all__ = ["MessageTransport"]

T = TypeVar("T")


class MessageTransport(MessageGroup):
    """The calls of a group whose ranks send each other messages."""

    def __init__(self, name: str, membership: Membership) -> None:
        self.name = name
        self.fused: Mapping[str, Fused] = {each: partial(self._blocking, each) for each in COLLECTIVES}
        self._calls: dict[tuple[int, int], dict[int, tuple[Facts, Bytes]]] = defaultdict(dict)  # by epoch and phase
        self._splits = 0
        super().__init__(membership)

    def way(self) -> tuple[str, int]:
        return "messages", 1

    def arrived(self, wire_rank: int, facts: Facts, payload: Bytes) -> None:
        if facts["kind"] == "call":
            with self.changed:
                call = self._calls[facts["epoch"], facts["phase"]]
                call[self._members.index(wire_rank)] = facts, payload
        super().arrived(wire_rank, facts, payload)

    # --- Collectives --------------------------------------------------------------------------------------------------

    def start(self, collective: str, *call: Any) -> Pending:
        queued = Queued(self, collective, nothing())
        self._submit(queued, self._steps(collective, *call))
        self._work_on()
        return queued

    def _blocking(self, collective: str, *call: Any) -> None:
        self._complete(collective, self._steps(collective, *call))

    def _steps(self, collective: str, *call: Any) -> Callable[[int], Steps]:
        """Return what makes the steps of a call, of its number."""
        check(lib.rc_check_collective(self.rank, self.size, COLLECTIVES[collective], *call[:-1]))  # all but the timeout
        return lambda epoch: self._collective(collective, epoch, *call)

    def _submit(self, queued: Queued, steps: Callable[[int], Steps]) -> None:
        """Queue a call."""
        self._check_open()  # before the lock, which a forked child may have inherited
        if self._queue.interrupted():
            text = f"{queued.words} was called by a signal handler, in the middle of another call of rank {self.rank}"
            raise ArgumentError(text, rank=self.rank)
        with self.changed:
            self._check()
            queued.steps = self._telling(steps(next(self._epochs)))
            self._queue.append(queued)

    def _complete(self, words: str, steps: Callable[[int], Steps]) -> None:
        """Do a call to its end. When this returns or raises, the memory is the caller's again."""
        queued = Queued(self, words, nothing())
        with self._breaking():
            try:
                self._submit(queued, steps)
                self._queue.drive(patient=True)  # with luck nothing has to be waited for
                queued.wait(-1.0)
            finally:
                while queued in self._queue:
                    self._queue.drive(patient=True)
                    self._wire.pause(self, self.news)

    def _telling(self, steps: Steps) -> Steps:
        """Break the group if a call fails here: perhaps it fails here only, and the others wait."""
        try:
            yield from steps
        except (MismatchError, MemoryShortage):  # which are raised on all ranks
            raise
        except RingcommError as error:
            with self.changed:
                self._fail(error)
            raise

    def _ask(self, words: str, block: Bytes, then: Callable[[list[Bytes]], T]) -> T:
        """Do what follows from what every rank says, in a call of its own; if it fails on one, all raise that."""
        results: list[T] = []

        def steps(epoch: int) -> Steps:
            said, deadline = Said(words), Deadline(self.timeout)
            yield from self._meet(said, epoch, deadline)
            answers = yield from self._exchange(said, epoch, deadline, 0, [block] * self.size)
            failure: Exception | None = None
            try:
                results.append(then(answers))
            except Exception as raised:
                failure = raised
            outcome = np.frombuffer(in_words(failure).encode(), np.uint8)
            outcomes = yield from self._exchange(said, epoch, deadline, 1, [outcome] * self.size)
            raise_told((theirs.tobytes().decode() for theirs in outcomes), self.rank, failure)
            self._done = epoch

        self._complete(words, steps)
        return results[0]

    def _collective(
        self,
        collective: str,
        epoch: int,
        source: Any,
        target: Any,
        count: int,
        dtype: int,
        op: int,
        factor: float,
        root: int,
        counts: Any,
        timeout: float,
    ) -> Steps:
        call = Blockwise(self.rank, self.size, collective, source, target, count, dtype, op, factor, root, counts)
        self._check()
        recorded = self._flight.begin(call.said.words, epoch)
        deadline = Deadline(self.limit(timeout))
        outcome = "failed"
        try:
            yield from self._meet(call.said, epoch, deadline)
            yield from self._carry_out(call, epoch, deadline)
            outcome = "done"
        except MismatchError:
            outcome = "mismatch"
            raise
        finally:
            if outcome != "failed":  # nothing more is owed
                self._done = epoch
            recorded.end(outcome)

    def _meet(self, said: Said, epoch: int, deadline: Deadline) -> Steps:  # noqa: ARG002
        """See to it that all ranks call the same. Here it is enough that every message says what its rank calls."""
        return nothing()

    def _carry_out(self, call: Blockwise, epoch: int, deadline: Deadline) -> Steps:
        return call.run(partial(self._exchange, call.said, epoch, deadline))

    def _exchange(
        self, said: Said, epoch: int, deadline: Deadline, phase: int, blocks: list[Bytes]
    ) -> Generator[None, None, list[Bytes]]:
        """Send block p to rank p, with what is called; return what came from each rank. Its own comes at once."""
        key = epoch, phase
        for rank in range(self.size):
            facts = {"kind": "call", "epoch": epoch, "phase": phase, "said": said}
            if rank != self.rank:
                self._say(rank, facts, blocks[rank].copy())
        with self.changed:
            here = self._calls[key]
            here[self.rank] = {"said": said}, blocks[self.rank]
        missing = lambda: [rank for rank in range(self.size) if rank not in here]  # noqa: E731 (one expression)
        yield from self.until(lambda: len(here) == self.size, deadline, f"{said.words} (epoch {epoch})", missing)
        with self.changed:
            del self._calls[key]
        calls = [Said(*here[rank][0]["said"]) for rank in range(self.size)]
        others = [rank for rank in range(self.size) if calls[rank] != said]
        if others:
            raise self._mismatch(said, epoch, others[-1], calls[others[-1]], self._differences(calls))
        return [here[rank][1] for rank in range(self.size)]

    def _differences(self, calls: list[Said]) -> list[str]:
        mine = calls[self.rank].counts
        other = f", other counts than on rank {self.rank}"
        return [
            f"rank {rank}: {words}{other if mine and counts != mine else ''}"
            for rank, (words, counts) in enumerate(calls)
        ]

    def _mismatch(self, said: Said, epoch: int, other: int, got: Said, lines: list[str]) -> MismatchError:
        """Return the error that all ranks raise, each with its own call and that of another rank."""
        text = "\n  ".join([f"the ranks called different things at epoch {epoch}:", *lines])
        name = said.collective
        return MismatchError(text, rank=other, collective=name, epoch=epoch, expected=said.words, got=got.words)

    # --- Point to point -----------------------------------------------------------------------------------------------

    def isend(self, data: Any, count: int, dtype: int, peer: int, tag: int, timeout: float) -> Pending:
        del timeout  # it is done when it is copied
        payload = view(data, count, dtype).copy()
        facts = {"kind": "letter", "tag": tag, "count": count, "dtype": dtype}
        self._check_open()
        with self.changed:
            self._check()
            if peer in self._gone:
                self._fail(self._gone[peer])
                self._check()
            if peer == self.rank:
                self._letters.deliver(peer, tag, count, dtype, payload)
                self.notify()
        if peer != self.rank:
            self._say(peer, facts, payload)
            self._wire.poll()
            if self._wire.busy():
                self._work_on()
        queued = Queued(self, "send", nothing())
        queued.finish()
        return queued

    def irecv(self, *call: Any) -> Pending:
        posted = self._post(*call)
        self._work_on()
        return posted

    def _post(self, *call: Any) -> Posted:
        posted = Posted(self, *call)
        self._check_open()
        with self.changed:
            self._check()
            self._letters.post(posted)
        return posted

    def send(self, *call: Any) -> None:
        self.isend(*call)

    def recv(self, *call: Any) -> int:
        with self._breaking():
            return self._post(*call).wait(-1.0)

    def sendrecv(self, *call: Any) -> int:
        data, count, dtype, dest, target, target_count, target_dtype, source, tag, timeout = call
        self.isend(data, count, dtype, dest, tag, timeout)
        return self.recv(target, target_count, target_dtype, source, tag, timeout)

    # --- Memory and groups --------------------------------------------------------------------------------------------

    def allocate(self, words: str, size: int) -> Any:
        """Return zeros. No peer reaches them: calls on them go the way of all arrays."""
        return self._ask(words, np.empty(0, np.uint8), lambda _: np.zeros(size, np.uint8).data)

    def split(self, color: int | None, key: int) -> Transport | None:
        said = np.array([color is not None, color or 0, key], np.int64).view(np.uint8)
        child = self._ask("split()", said, lambda answers: self._divide(answers, color))
        if isinstance(child, MessageTransport):
            with self.changed:
                self._children.add(child)
        return child

    def _divide(self, answers: list[Bytes], color: int | None) -> Transport | None:
        """Make the group of the ranks with this color. All ranks are here, also those that get none."""
        asked = [tuple(each.view(np.int64).tolist()) for each in answers]
        colors = sorted({theirs for has, theirs, _ in asked if has})
        groups = [
            sorted((rank for rank in range(self.size) if asked[rank][:2] == (1, each)), key=lambda rank: asked[rank][2])
            for each in colors
        ]  # sorted is stable: ties keep the order of the ranks
        self._splits += 1
        mine = None if color is None else colors.index(color)
        part = self._part(mine, 0 if mine is None else groups[mine].index(self.rank))
        if mine is None:
            return None
        members = [self._members[rank] for rank in groups[mine]]
        membership = replace(self._membership, members=members, group=f"{self._group}.{self._splits}.{mine}")
        return self._child(part, membership)

    def _part(self, group: int | None, rank: int) -> Any:
        """Make what a group needs beside the wire, for its number, and this rank's there."""

    def _child(self, part: Any, membership: Membership) -> Transport:  # noqa: ARG002
        return type(self)(self.name, membership)
