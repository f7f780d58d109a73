"""Messages over MPI."""

import json
import operator
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from ringcomm.transports.blocks import Bytes
from ringcomm.transports.messages.group import Facts, MessageGroup
from ringcomm.transports.messages.switch import Switch
from ringcomm.transports.mpi.lane import Lane, abandon
from ringcomm.transports.waits import Deadline, Turn

__all__ = ["MpiWire"]

ENVELOPE, PAYLOAD = 0, 1  # tags of the wire
LARGEST = 1 << 30  # bytes of a message of MPI
YIELDS = 20  # of the core, before a waiting rank sleeps
SHORTEST, LONGEST = 20e-6, 1e-3  # seconds it sleeps, growing


_lingering: set["MpiWire"] = set()  # that this rank has left, but not all others


class MpiWire(Switch):
    """Messages between the ranks of a communicator of MPI that nobody else uses (a Wire of ..messages.group).

    A message is an envelope with its facts, then its payload. Without MPI_THREAD_MULTIPLE only threads of the caller
    use MPI, so messages come when one of them waits for something.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        for wire in [*_lingering]:
            wire.poll()  # perhaps the others have left too: communicators of MPI are few
        super().__init__()
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.threads: bool = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.idle = 0  # looks in a row that found nothing
        self._comm, self._mpi = comm, MPI
        self._closing: dict[str, set[int]] = {}  # groups that were left, and who has not left them yet
        self._lanes: dict[str, list[Lane]] = {}  # of those
        self._patience = float("inf")  # the least of any of them
        self._turn = Turn()  # to poll
        self._outgoing: deque[Callable[[], Any]] = deque()  # parts of messages, in their order
        self._sent: deque[Any] = deque()  # requests, which keep the memory
        self._arriving: dict[int, deque[tuple[Facts, Bytes, list[Any]]]] = {}  # by peer, where something is

    def send(self, peer: int, facts: Facts, payload: Bytes) -> None:
        text = np.frombuffer(json.dumps({**facts, "bytes": payload.size}).encode(), np.uint8)
        parts = [(ENVELOPE, text), *((PAYLOAD, piece) for piece in self._pieces(payload))]
        # In one step, as signals see it: a message has all its parts, one after the other, or none.
        self._outgoing.extend([partial(self._comm.Isend, (part, self._mpi.BYTE), peer, tag) for tag, part in parts])
        self.poll()

    def poll(self) -> None:
        if not self._turn.mine():
            return  # somebody else does; and what comes must not be handed over in another order
        try:
            self._turn.begun = True
            self._start_sending()
            while self._sent and self._sent[0].Test():
                self._sent.popleft()
            while message := self._comm.Improbe(self._mpi.ANY_SOURCE, ENVELOPE, status := self._mpi.Status()):
                self._open(message, status)
            for peer in [*self._arriving]:
                self._hand_over_from(peer)
        except self._mpi.Exception as error:
            for peer in range(self.size):
                self.lose(peer, error)
        except BaseException as error:
            self.interrupt(error)
            self._start_sending()  # what the others are told of that
            raise
        finally:
            self._turn.begun = False
            self._turn.holder.clear()

    def _start_sending(self) -> None:
        # In one step as well: a handler that raises must not come between a part and its being sent.
        with suppress(IndexError):  # until there is no more
            self._sent.extend(map(operator.call, iter(self._outgoing.popleft, None)))

    def _open(self, message: Any, status: Any) -> None:
        """Read an envelope, and let its payload come."""
        text = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv((text, self._mpi.BYTE))
        facts = json.loads(text)
        payload = np.empty(facts["bytes"], np.uint8)
        source = status.Get_source()
        requests = [self._comm.Irecv((piece, self._mpi.BYTE), source, PAYLOAD) for piece in self._pieces(payload)]
        self._arriving.setdefault(source, deque()).append((facts, payload, requests))

    def _hand_over_from(self, peer: int) -> None:
        """Hand over what has come from a peer, up to the first message that is not whole."""
        messages = self._arriving[peer]
        while messages and self._mpi.Request.Testall(messages[0][2]):
            facts, payload, _ = messages.popleft()
            self.idle = 0
            self.hand_over(peer, facts, payload)
        if not messages:
            del self._arriving[peer]

    def busy(self) -> bool:
        return bool(self._outgoing or self._sent or self._arriving)

    def pause(self, group: MessageGroup, seen: int) -> None:
        self.poll()
        if group.news != seen:
            self.idle = 0
            return
        self.idle += 1
        if self.idle <= YIELDS:
            os.sched_yield()
        else:
            time.sleep(min(LONGEST, SHORTEST * (self.idle - YIELDS)))

    def hand_over(self, peer: int, facts: Facts, payload: Bytes) -> None:
        group = facts["group"]
        if group in self._closing and facts["kind"] == "closed":
            self._closing[group].discard(peer)
            if group in self._ended:
                self._free(group)
        super().hand_over(peer, facts, payload)

    def free_with(self, group: str, lanes: list[Lane]) -> None:
        """Free lanes when all ranks have left a group: until then something may come there."""
        self._lanes[group] = lanes

    def leave(self, group: str, staying: set[int], timeout: float) -> None:
        self._closing[group] = staying
        self._patience = min(self._patience, timeout)
        if self.end(group):
            deadline = Deadline(self._patience)
            while self.busy() and any(self._closing.values()):  # else nobody is left who could take what was sent
                self.poll()
                time.sleep(SHORTEST)
                if deadline.passed():
                    abandon(self._sent)
                    break
            _lingering.add(self)
        self._free(group)

    def _free(self, group: str) -> None:
        if self._closing.get(group, {group}) or self._closing.pop(group, None) is None:
            return  # somebody has not left it, or it was done
        for lane in self._lanes.pop(group, []):
            lane.free()
        self.free_if_unused()

    def free_if_unused(self) -> None:
        """Give the communicator back to MPI, if there is no group that uses it."""
        if not (self._closing or self._groups or self.busy()):
            _lingering.discard(self)
            self._comm.Free()

    @staticmethod
    def _pieces(data: Bytes) -> list[Bytes]:
        return [data[begin : begin + LARGEST] for begin in range(0, data.size, LARGEST)]
