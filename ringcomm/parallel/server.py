"""A parameter server: servers hold shards of the parameters; workers pull values and push gradients.

A server answers each worker in a thread of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from math import inf
from operator import add
from threading import Condition
from typing import Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ringcomm.errors import RingcommError, integer, refuse
from ringcomm.parallel.server_links import ALL, Link, Rows, abort, abort_on_error, close, connect

__all__ = ["ParameterServer", "Worker"]

LOST = RingcommError, RuntimeError  # what a message raises if the peer is lost: on ringcomm, on other backends


class ParameterServer:
    """Holds a shard of the parameters, and updates it with the gradients that workers push.

    After Li et al., Scaling Distributed Machine Learning with the Parameter Server (OSDI 2014). Some ranks of the world
    are servers, all others workers; all construct their objects together. The rows of each parameter (along its first
    dimension) are divided evenly among the servers, whose values the workers get with their first pull. ::

        if dist.get_rank() in servers:
            ParameterServer(model.parameters(), servers, partial(SGD, lr=0.1)).serve()
        else:
            with Worker(model.parameters(), servers) as worker:
                worker.pull({model.embedding.weight: ids})
                loss(model(ids), targets).backward()
                worker.push()

    With a staleness of 0, training is synchronous: a server takes a step with the mean of the gradients of all workers.
    Otherwise it takes one with each gradient as it arrives, so n workers take n times as many steps; and a worker that
    has pushed more than `staleness` times more often than the slowest waits in its next pull or push.

    Synchronous training in float32 or float64 gives the bits of a DataParallel over the workers with the same
    optimizer, if that updates each element by itself (SGD, Adam, AdamW), and the backend of the DataParallel adds
    gradients in the order of ranks, as ringcomm does on one machine. With two workers, any backend does.

    A worker is lost if its process dies, its `with` block raises, or it sends nothing for `timeout`. The others go on
    without it; gradients that it has pushed still count. If a server is lost, the workers fail.

    Args:
        parameters: the parameters of the model, which the server copies
        servers: global ranks of the servers
        optimizer: creates the optimizer for a list of parameters; for those pulled by rows, it gets sparse gradients
        staleness: by how many pushes a worker may be ahead of the slowest; None: by any number
        timeout: timeout of a message; None: torch's default, 30 minutes

    Attributes:
        parameters: this server's rows of each parameter
        optimizer: their optimizer
        lost: the error with which each lost worker failed, by rank

    Raises:
        ArgumentError: `staleness` is negative, `servers` are no ranks or all, or this rank is not one of them; or, on
            all ranks, the parameters differ in number, shape or dtype
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        servers: Sequence[int],
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        *,
        staleness: int | None = 0,
        timeout: timedelta | None = None,
    ) -> None:
        self._links = connect(list(parameters), servers, timeout, serves=True)
        with abort_on_error(self._links):
            self._staleness = inf if staleness is None else integer("staleness", staleness, 0)
            self.parameters = [nn.Parameter(part.clone()) for part in self._links[0].parts]
            self.optimizer = optimizer(self.parameters)
        for link in self._links:
            link.parts = [*self.parameters]  # not those of the model, which may be deleted
        self.lost: dict[int, BaseException] = {}
        self._pushes = {link.peer: 0 for link in self._links}  # of the workers that are neither closed nor lost
        self._gradients: dict[int, list[Tensor | None]] = {}  # pushed since the last step
        self._changed = Condition()  # guards these two, and the parameters

    def serve(self) -> None:
        """Answer the workers until each has closed or is lost; if all are lost, raise the error of the last one."""
        with ThreadPoolExecutor(len(self._links)) as threads, abort_on_error(self._links):
            for thread in as_completed([threads.submit(self._serve, link) for link in self._links]):
                thread.result()
        close(self._links)
        if len(self.lost) == len(self._links):
            raise self.lost.popitem()[1]

    def _serve(self, link: Link) -> None:
        """Answer one worker until it has closed or is lost."""
        try:
            while request := self._request(link):
                reply = self._perform(link.peer, *request)
                with suppress(*LOST):  # the next request raises it too
                    link.send(reply)
        finally:
            with self._changed:
                del self._pushes[link.peer]
                self._changed.notify_all()
                self._step()

    def _request(self, link: Link) -> tuple[list[Rows], list[Tensor] | None] | None:
        """Receive the rows that a worker pulls, or pushes with gradients; None: it has closed or is lost."""
        try:
            kind, rows = link.receive_object()
            if kind != "close":
                return rows, link.receive(rows) if kind == "push" else None
            link.send_object("closed")
        except LOST as error:
            self.lost[link.peer] = error
        return None

    def _perform(self, worker: int, rows: list[Rows], gradients: list[Tensor] | None) -> list[Tensor]:
        """Return the values, or take the gradients, as soon as the worker is not too far ahead."""
        with self._changed:
            self._changed.wait_for(lambda: self._pushes[worker] - min(self._pushes.values()) <= self._staleness)
            if gradients is None:
                return [each.detach()[chosen].clone() for each, chosen in zip(self.parameters, rows, strict=True)]
            self._gradients[worker] = [*map(_pushed, self.parameters, rows, gradients)]
            self._pushes[worker] += 1
            self._changed.notify_all()
            self._step()
            return []

    def _step(self) -> None:
        """Take a step with the mean of the pushed gradients, unless those of other workers are missing."""
        if not self._gradients or (self._staleness == 0 and self._pushes.keys() - self._gradients.keys()):
            return
        workers = [self._gradients.pop(worker) for worker in sorted(self._gradients)]
        for parameter, gradients in zip(self.parameters, zip(*workers, strict=True), strict=True):
            terms = [gradient * (1 / len(workers)) for gradient in gradients if gradient is not None]
            parameter.grad = reduce(add, terms) if terms else None
        self.optimizer.step()


class Worker:
    """Pulls the parameters of a model from the servers, and pushes their gradients; see `ParameterServer`.

    A context manager: at the end of its block, the servers go on without it. If the block raises, it is lost. All
    calls raise PeerLost if a server is lost (RuntimeError on other backends).
    """

    def __init__(
        self, parameters: Iterable[Tensor], servers: Sequence[int], *, timeout: timedelta | None = None
    ) -> None:
        self.parameters = list(parameters)
        self._links = connect(self.parameters, servers, timeout, serves=False)
        self._rows: dict[Tensor, Tensor] = {}  # pulled last, of parameters that were not pulled as a whole

    @torch.no_grad()
    def pull(self, rows: Mapping[Tensor, Tensor] | None = None) -> None:
        """Get the values of the parameters; of those in `rows`, only the rows of these numbers, which may repeat.

        Communication: sends a pickled request with the distinct numbers, and receives the values.

        Raises:
            ArgumentError: a key of `rows` is not one of the parameters, or a number is not one of its rows
        """
        distinct = {parameter: torch.unique(numbers).cpu().long() for parameter, numbers in (rows or {}).items()}
        if others := distinct.keys() - {parameter for parameter in self.parameters if parameter.dim()}:
            raise refuse("rows", "parameters of the worker as keys", [tuple(each.shape) for each in others])
        for parameter, numbers in distinct.items():
            if ((numbers < 0) | (numbers >= len(parameter))).any():
                raise refuse("rows of a parameter", f"numbers from 0 to {len(parameter) - 1}", numbers.tolist())
        self._rows = distinct
        requests = [(link, self._within(link)) for link in self._links]
        for link, wanted in requests:
            link.send_object(("pull", wanted))
        for link, wanted in requests:
            for part, chosen, values in zip(link.parts, wanted, link.receive(wanted), strict=True):
                part[chosen] = values.to(part.device)

    @torch.no_grad()
    def push(self) -> None:
        """Send the gradients; of parameters that were pulled by rows, those of the same rows.

        Communication: sends a pickled request with the numbers, and the gradients.
        """
        grads = [parameter.grad for parameter in self.parameters]
        for link in self._links:
            rows = [None if grad is None else each for grad, each in zip(grads, self._within(link), strict=True)]
            link.send_object(("push", rows))
            link.send(map(_selected, grads, rows, link.starts, link.parts))

    def _within(self, link: Link) -> list[Rows]:
        """Return the rows pulled last, as numbers in the parts of a server."""
        found: list[Rows] = []
        for parameter, start, part in zip(self.parameters, link.starts, link.parts, strict=True):
            local = self._rows[parameter] - start if parameter in self._rows else None
            found.append(ALL if local is None else local[(local >= 0) & (local < len(part))])
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind:
            abort(self._links)
            return
        for link in self._links:
            link.send_object(("close", []))
            link.receive_object()  # now the server has all messages
        close(self._links)


def _pushed(parameter: Tensor, rows: Rows, values: Tensor) -> Tensor | None:
    """Return the gradient that a worker has pushed."""
    if isinstance(rows, Tensor):
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values, parameter.shape, check_invariants=True)
    return None if rows is None else values


def _selected(grad: Tensor | None, rows: Rows, start: int, part: Tensor) -> Tensor:
    """Return the rows of a gradient that belong to a part, dense."""
    if grad is None:
        return part[:0]
    if isinstance(rows, Tensor):
        return grad.index_select(0, (rows + start).to(grad.device)).to_dense()
    whole = grad.to_dense() if grad.dim() else grad.view(1)
    return whole[start : start + len(part)]
