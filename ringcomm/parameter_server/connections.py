"""The messages between workers and parameter servers.

Each worker and each server have a process group of their own, because a failure breaks a whole group: a lost worker
costs a server one group, and the other workers go on.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import product, zip_longest
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.errors import refuse
from ringcomm.torch.timeouts import timeout_of

__all__ = ["ALL", "PeerConnection", "Rows", "abort", "abort_on_error", "close", "connect"]

ALL: Final = slice(None)
Rows = Tensor | slice | None  # of a part: their numbers, ALL, or none


class PeerConnection:
    """Messages to `peer` in a group of two; `parts` are the rows of parameters on the server, from `starts` on."""

    def __init__(self, peer: int, group: Any, parts: list[Tensor], starts: list[int]) -> None:
        self.peer, self.group, self.parts, self.starts = peer, group, parts, starts
        self._waits = False  # whether a request of this worker has no answer yet

    # --- Requests of a worker, and a server's answers -----------------------------------------------------------------

    def send_request(self, kind: str, rows: list[Rows]) -> None:
        """Send a request, once the last one is answered: on some backends, two ranks that send wait forever."""
        self.await_answer()
        dist.send_object_list([(kind, rows)], self.peer, group=self.group)
        self._waits = True

    def receive_request(self) -> tuple[str, list[Rows]]:
        received: list[Any] = [None]
        dist.recv_object_list(received, self.peer, group=self.group)
        kind, rows = received[0]
        return kind, rows

    def send_answer(self, *, done: bool) -> None:
        """Tell the worker that its request is carried out; or not yet, so that it waits for another `timeout`."""
        self.send([torch.tensor([done])])

    def await_answer(self) -> None:
        """Wait until the server has carried out the last request."""
        done = torch.empty(1, dtype=torch.bool)
        while self._waits:
            dist.recv(done, self.peer, group=self.group)
            self._waits = not done

    # --- Tensors ------------------------------------------------------------------------------------------------------

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Send the tensors that are not empty."""
        for x in tensors:
            if x.numel():
                dist.send(x.contiguous().cpu(), self.peer, group=self.group)

    def receive(self, rows: Sequence[Rows]) -> list[Tensor]:
        """Receive a tensor for these rows of each part."""
        received = []
        for part, chosen in zip(self.parts, rows, strict=True):
            count = len(chosen) if isinstance(chosen, Tensor) else 0 if chosen is None else len(part)
            received.append(torch.empty((count, *part.shape[1:]), dtype=part.dtype))
            if received[-1].numel():
                dist.recv(received[-1], self.peer, group=self.group)
        return received


def connect(
    parameters: Sequence[Tensor], servers: Sequence[int], timeout: timedelta | None, *, serves: bool
) -> list[PeerConnection]:
    """Return the connections of this rank: a server's to all workers, or a worker's to all servers, in order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    workers = {*range(size)} - {*servers}
    if not servers or not workers or len(workers) + len(servers) > size or serves != (rank in servers):
        role = "among" if serves else "not among"
        raise refuse("servers", f"ranks below {size}, not all, with rank {rank} {role} them", [*servers])
    _check_equal(parameters, size)
    whole = [parameter.detach() if parameter.dim() else parameter.detach().view(1) for parameter in parameters]
    connections = []
    for (place, server), worker in product(enumerate(servers), sorted(workers)):
        group = dist.new_group([server, worker], timeout or timeout_of())
        if rank in (server, worker):
            starts, ends = ([len(x) * i // len(servers) for x in whole] for i in (place, place + 1))
            parts = [x[start:end] for x, start, end in zip(whole, starts, ends, strict=True)]
            connections.append(PeerConnection(server + worker - rank, group, parts, starts))
    return connections


def _check_equal(parameters: Iterable[Tensor], size: int) -> None:
    """Raise on all ranks if they have parameters of other shapes or dtypes."""
    ranks: list[list[str]] = [[]] * size
    dist.all_gather_object(ranks, [f"{tuple(x.shape)} {x.dtype}" for x in parameters])
    for rank, theirs in enumerate(ranks):
        for number, (first, other) in enumerate(zip_longest(ranks[0], theirs, fillvalue="none")):
            if first != other:
                raise refuse(f"parameter {number} of rank {rank}", f"as on rank 0, {first}", other)


def close(connections: Iterable[PeerConnection]) -> None:
    for connection in connections:
        dist.destroy_process_group(connection.group)


def abort(connections: Iterable[PeerConnection]) -> None:
    for connection in connections:
        connection.group.abort()


@contextmanager
def abort_on_error(connections: Iterable[PeerConnection]) -> Iterator[None]:
    """Abort the connections if this rank fails inside the block, so that no peer waits for it."""
    try:
        yield
    except BaseException:
        abort(connections)
        raise
