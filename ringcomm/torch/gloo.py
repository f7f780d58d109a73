"""Groups that span hosts: the message transport over send and recv of torch's own Gloo.

For each peer a thread waits for messages. Gloo cannot cancel a receive, so the last message to each peer is a goodbye:
a rank sends it when it closes, and in answer to the peer's. No rank waits for a peer after its goodbye.
"""

import json
import queue
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ringcomm.transports.blocks import NOTHING, Bytes
from ringcomm.transports.messages.dispatcher import Dispatcher
from ringcomm.transports.messages.group import Header, Membership, MessageGroup
from ringcomm.transports.messages.transport import MessageTransport

__all__ = ["GlooLink", "connect"]

c10d: Any = dist.distributed_c10d
UNLIMITED = timedelta(days=3650)
GOODBYE = {"kind": "goodbye"}  # the last message to a peer
SLICE = 0.1  # seconds between checks of deadlines and signals, which wake no thread
DRAIN = 2.0  # seconds that closing waits for peers that do not answer


class GlooLink(Dispatcher):
    """Messages between the ranks of a group, over Gloo (ringcomm.transports.messages.group.Link)."""

    threads = True

    def __init__(self, rank: int, size: int, store: Any, timeout: float) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self._gloo = c10d.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        self._left: set[int] = set()  # peers to which the goodbye was sent
        self._outgoing: dict[int, queue.SimpleQueue[tuple[Header, Bytes]]] = {
            peer: queue.SimpleQueue() for peer in range(size) if peer != rank
        }
        self._threads = [
            threading.Thread(target=work, args=(peer,), name=f"ringcomm {name} {peer}", daemon=True)
            for peer in self._outgoing
            for name, work in (("from", self._read), ("to", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, peer: int, header: Header, payload: Bytes) -> None:
        with self._lock:
            if peer in self._left:
                return
            if header is GOODBYE:
                self._left.add(peer)
            self._outgoing[peer].put((header, payload))

    def poll(self) -> None:
        """Do nothing: the threads of this link receive."""

    def busy(self) -> bool:
        return False

    def pause(self, group: MessageGroup, seen: int) -> None:
        with group.changed:
            group.changed.wait_for(lambda: group.changes != seen, SLICE)

    def leave(self, name: str, staying: set[int], timeout: float) -> None:  # noqa: ARG002
        if self.unregister(name):
            for peer in self._outgoing:
                self.send(peer, GOODBYE, NOTHING)
            deadline = time.monotonic() + DRAIN
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(max(0.0, deadline - time.monotonic()))

    def _write(self, peer: int) -> None:
        """Send the messages for a peer, up to the goodbye: the length of the header, the header, the payload."""
        header: Header = {}
        while header is not GOODBYE:
            header, payload = self._outgoing[peer].get()
            if peer in self._lost:
                continue
            text = np.frombuffer(bytearray(json.dumps({**header, "bytes": payload.size}).encode()), np.uint8)
            try:
                for part in (np.array([text.size]).view(np.uint8), text, payload):
                    if part.size:
                        self._gloo.send([torch.from_numpy(part)], peer, 0).wait(UNLIMITED)
            except RuntimeError as error:
                self.lose(peer, error)

    def _read(self, peer: int) -> None:
        try:
            while True:
                length = int(self._receive(peer, 8).view(np.int64)[0])
                header = json.loads(self._receive(peer, length).tobytes())
                payload = self._receive(peer, header["bytes"])
                if header["kind"] == GOODBYE["kind"]:
                    self.send(peer, GOODBYE, NOTHING)
                    return
                self.dispatch(peer, header, payload)
        except RuntimeError as error:
            self.lose(peer, error)

    def _receive(self, peer: int, size: int) -> Bytes:
        data = torch.empty(size, dtype=torch.uint8)
        if size:
            self._gloo.recv([data], peer, 0).wait(UNLIMITED)
        return data.numpy()


def connect(rank: int, size: int, store: Any, timeout: float) -> MessageTransport:
    """Connect the ranks that share a store of torch, on any hosts."""
    membership = Membership(GlooLink(rank, size, store, timeout), list(range(size)), "0", timeout)
    return MessageTransport("gloo", membership)
