"""The server: it answers each worker in a thread of its own, and steps in the thread that serves."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from math import inf
from operator import add
from threading import Condition

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from ringcomm.errors import RingcommError, integer
from ringcomm.parameter_server.connections import PeerConnection, Rows, abort_on_error, close, connect
from ringcomm.torch.timeouts import timeout_of

__all__ = ["ParameterServer"]

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

    A worker is lost if its process dies, its `with` block raises, or it is silent for `timeout` without being made to
    wait. The others go on without it; gradients that it has pushed still count. If a server is lost, the workers fail.

    Args:
        parameters: the parameters of the model, which the server copies
        servers: global ranks of the servers
        optimizer: creates the optimizer for a list of parameters; for those pulled by rows, it gets sparse gradients
        staleness: by how many pushes a worker may be ahead of the slowest; None: by any number
        timeout: timeout of a message, the same on all ranks; None: that of `init_process_group`. A server sends one in
            every third of it to a worker that waits.

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
        self._connections = connect(list(parameters), servers, timeout, serves=True)
        self._interval = (timeout or timeout_of() or default_pg_timeout).total_seconds() / 3
        with abort_on_error(self._connections):
            self._staleness = inf if staleness is None else integer("staleness", staleness, 0)
            self.parameters = [nn.Parameter(part.clone()) for part in self._connections[0].parts]
            self.optimizer = optimizer(self.parameters)
        for connection in self._connections:
            connection.parts = [*self.parameters]  # not those of the model, which may be deleted
        self.lost: dict[int, BaseException] = {}
        self._pushes = dict.fromkeys((each.peer for each in self._connections), 0)  # of workers neither closed nor lost
        self._gradients: dict[int, list[Tensor | None]] = {}  # pushed since the last step
        self._stepping = False  # the parameters are being written
        self._over = False  # no step will be taken any more: all have left, or one has failed
        self._changed = Condition()  # guards all four

    def serve(self) -> None:
        """Answer the workers until each has closed or is lost; if all are lost, raise the error of the last one."""
        with ThreadPoolExecutor(len(self._connections)) as threads, abort_on_error(self._connections):
            answering = [threads.submit(self._serve, connection) for connection in self._connections]
            self._step_until_all_have_left()
            for thread in answering:
                thread.result()
        close(self._connections)
        if len(self.lost) == len(self._connections):
            raise self.lost.popitem()[1]

    # --- The thread of a worker ---------------------------------------------------------------------------------------

    def _serve(self, connection: PeerConnection) -> None:
        """Answer one worker until it has closed or is lost."""
        try:
            with abort_on_error(self._connections):
                while request := self._request(connection):
                    if (reply := self._perform(connection, *request)) is None:
                        break
                    with suppress(*LOST):  # the next request raises it too
                        connection.send_answer(done=True)
                        connection.send(reply)
        finally:
            with self._changed:
                del self._pushes[connection.peer]
                self._changed.notify_all()

    def _request(self, connection: PeerConnection) -> tuple[list[Rows], list[Tensor] | None] | None:
        """Receive the rows that a worker pulls, or pushes with gradients; None: it has closed or is lost."""
        try:
            kind, rows = connection.receive_request()
            if kind != "close":
                return rows, connection.receive(rows) if kind == "push" else None
            connection.send_answer(done=True)
        except LOST as error:
            self.lost[connection.peer] = error
        return None

    def _perform(
        self, connection: PeerConnection, rows: list[Rows], gradients: list[Tensor] | None
    ) -> list[Tensor] | None:
        """Return the values, or take the gradients, between steps and once the worker is not too far ahead.

        A step may take longer than the timeout, so a worker that waits hears of it. If a step fails, return None: the
        worker gets the error when its connection is aborted.
        """
        worker = connection.peer

        def released() -> bool:
            ahead = self._pushes[worker] - min(self._pushes.values())
            return self._over or (ahead <= self._staleness and not self._stepping and not self._due())

        while True:
            with self._changed:
                if self._changed.wait_for(released, self._interval):
                    if self._over:
                        return None
                    if gradients is None:
                        chosen = zip(self.parameters, rows, strict=True)
                        return [each.detach()[numbers].clone() for each, numbers in chosen]
                    self._gradients[worker] = [*map(_pushed, self.parameters, rows, gradients)]
                    self._pushes[worker] += 1
                    self._changed.notify_all()
                    return []
            with suppress(*LOST):
                connection.send_answer(done=False)

    # --- Steps --------------------------------------------------------------------------------------------------------

    def _step_until_all_have_left(self) -> None:
        try:
            while gradients := self._pushed_for_a_step():
                self._step(gradients)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _pushed_for_a_step(self) -> list[list[Tensor | None]]:
        """Wait until a step is due, and return the gradients of each worker for it; none, once all have left."""
        with self._changed:
            self._stepping = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._due() or not self._pushes)
            gradients = [self._gradients.pop(worker) for worker in self._due()]
            self._stepping = True
            return gradients

    def _due(self) -> list[int]:
        """Return the workers whose gradients the next step takes: with a staleness, one; else all, once they pushed."""
        if self._staleness:
            return [*self._gradients][:1]
        return [] if self._pushes.keys() - self._gradients.keys() else sorted(self._gradients)

    def _step(self, workers: list[list[Tensor | None]]) -> None:
        """Take a step with the mean of the gradients of these workers."""
        for parameter, gradients in zip(self.parameters, zip(*workers, strict=True), strict=True):
            terms = [gradient * (1 / len(workers)) for gradient in gradients if gradient is not None]
            parameter.grad = reduce(add, terms) if terms else None
        self.optimizer.step()


def _pushed(parameter: Tensor, rows: Rows, values: Tensor) -> Tensor | None:
    """Return the gradient that a worker has pushed, of rows that it has pulled before: they are rows of the parameter.

    Not with check_invariants: torch then changes a setting of the process, and threads may leave it on for all.
    """
    if isinstance(rows, Tensor):
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values, parameter.shape)
    return None if rows is None else values
