"""The messages between workers and parameter servers.

Each worker and each server have a process group of their own, because a failure breaks a whole group: a lost worker
costs a server one group, and the other workers go on.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.errors import refuse
from ringcomm.parallel.data import check_replicas
from ringcomm.parallel.grid import Axis

__all__ = ["ALL", "Link", "Rows", "abort", "abort_on_error", "close", "connect"]

ALL: Final = slice(None)
Rows = Tensor | slice | None  # of a part: their numbers, ALL, or none


class Link:
    """Messages to `peer` in a group of two; `parts` are the rows of parameters on the server, from `starts` on."""

    def __init__(self, peer: int, group: Any, parts: list[Tensor], starts: list[int]) -> None:
        self.peer, self.group, self.parts, self.starts = peer, group, parts, starts

    def send_object(self, message: object) -> None:
        dist.send_object_list([message], self.peer, group=self.group)

    def receive_object(self) -> Any:
        received: list[Any] = [None]
        dist.recv_object_list(received, self.peer, group=self.group)
        return received[0]

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
) -> list[Link]:
    """Return the links of this rank: a server's to all workers, or a worker's to all servers, in order."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    workers = {*range(size)} - {*servers}
    if not servers or not workers or len(workers) + len(servers) > size or serves != (rank in servers):
        role = "among" if serves else "not among"
        raise refuse("servers", f"ranks below {size}, not all, with rank {rank} {role} them", [*servers])
    assert world
    check_replicas(nn.ParameterList(parameters), Axis("world", size, rank, tuple(range(size)), world))
    whole = [parameter.detach() if parameter.dim() else parameter.detach().view(1) for parameter in parameters]
    links = []
    for (place, server), worker in product(enumerate(servers), sorted(workers)):
        group = dist.new_group([server, worker], timeout)
        if rank in (server, worker):
            starts, ends = ([len(x) * i // len(servers) for x in whole] for i in (place, place + 1))
            parts = [x[start:end] for x, start, end in zip(whole, starts, ends, strict=True)]
            links.append(Link(server + worker - rank, group, parts, starts))
    return links


def close(links: Iterable[Link]) -> None:
    for link in links:
        dist.destroy_process_group(link.group)


def abort(links: Iterable[Link]) -> None:
    for link in links:
        link.group.abort()


@contextmanager
def abort_on_error(links: Iterable[Link]) -> Iterator[None]:
    """Abort the links if this rank fails inside the block, so that no peer waits for it."""
    try:
        yield
    except BaseException:
        abort(links)
        raise
