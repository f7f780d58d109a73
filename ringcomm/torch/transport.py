"""Groups that span hosts: the messages of ringcomm.transports.messages, over send and recv of torch's own Gloo.

For each peer a thread waits for what comes from there. Gloo cannot be told to stop waiting, so the last message of each
rank to each other is a goodbye: it is said by a rank that closes, and by one that has been told so. After it, nobody
waits for this rank any more.
"""

import json
import logging
import queue
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ringcomm.transports.blocks import Bytes
from ringcomm.transports.messages.group import Facts, Membership, MessageGroup
from ringcomm.transports.messages.switch import Switch
from ringcomm.transports.messages.transport import MessageTransport

__all__ = ["GlooWire", "connect"]

log = logging.getLogger("ringcomm")

c10d: Any = dist.distributed_c10d
FOR_EVER = timedelta(days=3650)
GOODBYE = {"kind": "goodbye"}  # what a wire says to a wire
NOTHING = np.empty(0, np.uint8)
SLICE = 0.1  # seconds between two looks at what nobody is woken for: deadlines, signals
PATIENCE = 2.0  # seconds a wire waits, at its end, for peers that do not answer


class GlooWire(Switch):
    """Messages between the ranks of a group, over Gloo (ringcomm.transports.messages.group.Wire)."""

    threads = True

    def __init__(self, rank: int, size: int, store: Any, timeout: float) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self._gloo = c10d.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        self._left: set[int] = set()  # peers that have been told goodbye
        self._outgoing: dict[int, queue.SimpleQueue[tuple[Facts, Bytes]]] = {
            peer: queue.SimpleQueue() for peer in range(size) if peer != rank
        }
        self._threads = [
            threading.Thread(target=work, args=(peer,), name=f"ringcomm {name} {peer}", daemon=True)
            for peer in self._outgoing
            for name, work in (("from", self._read), ("to", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, peer: int, facts: Facts, payload: Bytes) -> None:
        with self._lock:
            if peer in self._left:
                return
            if facts is GOODBYE:
                self._left.add(peer)
            self._outgoing[peer].put((facts, payload))

    def poll(self) -> None:
        """Do nothing: the threads of the wire do."""

    def busy(self) -> bool:
        return False

    def pause(self, group: MessageGroup, seen: int) -> None:
        with group.changed:
            group.changed.wait_for(lambda: group.news != seen, SLICE)

    def leave(self, group: str, staying: set[int], timeout: float) -> None:  # noqa: ARG002
        if self.end(group):
            for peer in self._outgoing:
                self.send(peer, GOODBYE, NOTHING)
            deadline = time.monotonic() + PATIENCE
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(max(0.0, deadline - time.monotonic()))

    def _write(self, peer: int) -> None:
        """Send what is queued for a peer, until the goodbye: the length of the facts, the facts, the payload."""
        facts: Facts = {}
        while facts is not GOODBYE:
            facts, payload = self._outgoing[peer].get()
            if peer in self._lost:
                continue
            text = np.frombuffer(bytearray(json.dumps({**facts, "bytes": payload.size}).encode()), np.uint8)
            try:
                for part in (np.array([text.size]).view(np.uint8), text, payload):
                    if part.size:
                        self._gloo.send([torch.from_numpy(part.copy() if part is text else part)], peer, 0).wait(
                            FOR_EVER
                        )
            except RuntimeError as error:
                self.lose(peer, error)

    def _read(self, peer: int) -> None:
        try:
            while True:
                length = int(self._receive(peer, 8).view(np.int64)[0])
                facts = json.loads(self._receive(peer, length).tobytes())
                payload = self._receive(peer, facts["bytes"])
                if facts["kind"] == GOODBYE["kind"]:
                    self.send(peer, GOODBYE, NOTHING)
                    return
                self.hand_over(peer, facts, payload)
        except RuntimeError as error:
            self.lose(peer, error)

    def _receive(self, peer: int, size: int) -> Bytes:
        data = torch.empty(size, dtype=torch.uint8)
        if size:
            self._gloo.recv([data], peer, 0).wait(FOR_EVER)
        return data.numpy()


def connect(rank: int, size: int, store: Any, timeout: float) -> MessageTransport:
    """Connect with those who hold the same store of torch, wherever they are."""
    membership = Membership(GlooWire(rank, size, store, timeout), list(range(size)), "0", timeout)
    return MessageTransport("gloo", membership)
