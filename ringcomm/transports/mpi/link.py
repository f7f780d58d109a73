"""The message link over MPI."""

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
from ringcomm.transports.messages.dispatcher import Dispatcher
from ringcomm.transports.messages.group import Header, MessageGroup
from ringcomm.transports.mpi.rail import Rail, abandon
from ringcomm.transports.waits import Deadline, ProgressLock

__all__ = ["MpiLink"]

HEADER, PAYLOAD = 0, 1  # MPI tags
LARGEST = 1 << 30  # bytes of one MPI message
YIELDS = 20  # of the core, before a waiting rank sleeps
SHORTEST, LONGEST = 20e-6, 1e-3  # seconds of a sleep, growing


_lingering: set["MpiLink"] = set()  # links that this rank has left, and other ranks have not


class MpiLink(Dispatcher):
    """Messages between the ranks of a private MPI communicator (a Link of ..messages.group).

    A message is its header, then its payload. Without MPI_THREAD_MULTIPLE only the caller's threads use MPI, so
    messages arrive while one of them waits.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        for link in [*_lingering]:
            link.poll()  # frees it if the others have left too: MPI has few communicators
        super().__init__()
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.threads: bool = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.idle = 0  # polls in a row that found nothing
        self._comm, self._mpi = comm, MPI
        self._closing: dict[str, set[int]] = {}  # groups left by this rank → the ranks that have not left them yet
        self._rails: dict[str, list[Rail]] = {}  # of these groups
        self._drain = float("inf")  # seconds: the shortest timeout with which a group was left
        self._progress = ProgressLock()  # to poll
        self._outgoing: deque[Callable[[], Any]] = deque()  # parts of messages, in order
        self._sent: deque[Any] = deque()  # requests, which keep the memory alive
        self._arriving: dict[int, deque[tuple[Header, Bytes, list[Any]]]] = {}  # by peer

    def send(self, peer: int, header: Header, payload: Bytes) -> None:
        text = np.frombuffer(json.dumps({**header, "bytes": payload.size}).encode(), np.uint8)
        parts = [(HEADER, text), *((PAYLOAD, piece) for piece in self._pieces(payload))]
        # One step, as far as signals can tell: all parts of a message are queued in a row, or none.
        self._outgoing.extend([partial(self._comm.Isend, (part, self._mpi.BYTE), peer, tag) for tag, part in parts])
        self.poll()

    def poll(self) -> None:
        if not self._progress.acquire():
            return  # another thread polls, and messages must be dispatched in order
        try:
            self._progress.begun = True
            self._start_sending()
            while self._sent and self._sent[0].Test():
                self._sent.popleft()
            while message := self._comm.Improbe(self._mpi.ANY_SOURCE, HEADER, status := self._mpi.Status()):
                self._open(message, status)
            for peer in [*self._arriving]:
                self._dispatch_from(peer)
        except self._mpi.Exception as error:
            for peer in range(self.size):
                self.lose(peer, error)
        except BaseException as error:
            self.interrupt(error)
            self._start_sending()  # the failure messages
            raise
        finally:
            self._progress.begun = False
            self._progress.holder.clear()

    def _start_sending(self) -> None:
        # One step too: a handler that raises must not come between taking a part and sending it.
        with suppress(IndexError):  # the queue is empty
            self._sent.extend(map(operator.call, iter(self._outgoing.popleft, None)))

    def _open(self, message: Any, status: Any) -> None:
        """Receive a header, and start to receive its payload."""
        text = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv((text, self._mpi.BYTE))
        header = json.loads(text)
        payload = np.empty(header["bytes"], np.uint8)
        source = status.Get_source()
        requests = [self._comm.Irecv((piece, self._mpi.BYTE), source, PAYLOAD) for piece in self._pieces(payload)]
        self._arriving.setdefault(source, deque()).append((header, payload, requests))

    def _dispatch_from(self, peer: int) -> None:
        """Dispatch the messages of a peer, up to the first incomplete one."""
        messages = self._arriving[peer]
        while messages and self._mpi.Request.Testall(messages[0][2]):
            header, payload, _ = messages.popleft()
            self.idle = 0
            self.dispatch(peer, header, payload)
        if not messages:
            del self._arriving[peer]

    def busy(self) -> bool:
        return bool(self._outgoing or self._sent or self._arriving)

    def pause(self, group: MessageGroup, seen: int) -> None:
        self.poll()
        if group.changes != seen:
            self.idle = 0
            return
        self.idle += 1
        if self.idle <= YIELDS:
            os.sched_yield()
        else:
            time.sleep(min(LONGEST, SHORTEST * (self.idle - YIELDS)))

    def dispatch(self, peer: int, header: Header, payload: Bytes) -> None:
        name = header["group"]
        if name in self._closing and header["kind"] == "closed":
            self._closing[name].discard(peer)
            if name in self._ended:
                self._free(name)
        super().dispatch(peer, header, payload)

    def free_with(self, name: str, rails: list[Rail]) -> None:
        """Free these rails once all ranks have left a group: until then messages may arrive on them."""
        self._rails[name] = rails

    def leave(self, name: str, staying: set[int], timeout: float) -> None:
        self._closing[name] = staying
        self._drain = min(self._drain, timeout)
        if self.unregister(name):
            deadline = Deadline(self._drain)
            while self.busy() and any(self._closing.values()):  # once all have left, no rank takes messages
                self.poll()
                time.sleep(SHORTEST)
                if deadline.passed():
                    abandon(self._sent)
                    break
            _lingering.add(self)
        self._free(name)

    def _free(self, name: str) -> None:
        if self._closing.get(name, {name}) or self._closing.pop(name, None) is None:
            return  # a rank has not left it, or it was freed before
        for rail in self._rails.pop(name, []):
            rail.free()
        self.free_if_unused()

    def free_if_unused(self) -> None:
        """Give the communicator back to MPI unless a group uses it."""
        if not (self._closing or self._groups or self.busy()):
            _lingering.discard(self)
            self._comm.Free()

    @staticmethod
    def _pieces(data: Bytes) -> list[Bytes]:
        return [data[begin : begin + LARGEST] for begin in range(0, data.size, LARGEST)]
