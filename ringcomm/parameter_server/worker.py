"""The worker: it pulls values from the servers, and pushes gradients to them."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Self

import torch
from torch import Tensor

from ringcomm.errors import refuse
from ringcomm.parameter_server.connections import ALL, PeerConnection, Rows, abort, close, connect

__all__ = ["Worker"]


class Worker:
    """Pulls the parameters of a model from the servers, and pushes their gradients; see `ParameterServer`.

    A context manager: at the end of its block, the servers go on without it. If the block raises, it is lost. All
    calls raise PeerLost if a server is lost (RuntimeError on other backends).
    """

    def __init__(
        self, parameters: Iterable[Tensor], servers: Sequence[int], *, timeout: timedelta | None = None
    ) -> None:
        self.parameters = list(parameters)
        self._connections = connect(self.parameters, servers, timeout, serves=False)
        self._rows: dict[Tensor, Tensor] = {}  # pulled last, of parameters that were not pulled as a whole

    @torch.no_grad()
    def pull(self, rows: Mapping[Tensor, Tensor] | None = None) -> None:
        """Get the values of the parameters; of those in `rows`, only the rows of these numbers, which may repeat.

        Communication: sends a pickled request with the distinct numbers, and receives an answer of a byte and the
        values.

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
        requests = [(connection, self._within(connection)) for connection in self._connections]
        for connection, wanted in requests:
            connection.send_request("pull", wanted)
        for connection, wanted in requests:
            connection.await_answer()
            for part, chosen, values in zip(connection.parts, wanted, connection.receive(wanted), strict=True):
                part[chosen] = values.to(part.device)

    @torch.no_grad()
    def push(self) -> None:
        """Send the gradients; of parameters that were pulled by rows, those of the same rows.

        Communication: sends a pickled request with the numbers, and the gradients; the next call awaits the answer.
        """
        grads = [parameter.grad for parameter in self.parameters]
        for connection in self._connections:
            rows = [None if grad is None else each for grad, each in zip(grads, self._within(connection), strict=True)]
            connection.send_request("push", rows)
            connection.send(map(_selected, grads, rows, connection.starts, connection.parts))

    def _within(self, connection: PeerConnection) -> list[Rows]:
        """Return the rows pulled last, as numbers in the parts of a server."""
        found: list[Rows] = []
        for parameter, start, part in zip(self.parameters, connection.starts, connection.parts, strict=True):
            local = self._rows[parameter] - start if parameter in self._rows else None
            found.append(ALL if local is None else local[(local >= 0) & (local < len(part))])
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind:
            abort(self._connections)
            return
        for connection in self._connections:
            connection.send_request("close", [])
            connection.await_answer()  # now the server has all messages
        close(self._connections)


def _selected(grad: Tensor | None, rows: Rows, start: int, part: Tensor) -> Tensor:
    """Return the rows of a gradient that belong to a part, dense."""
    if grad is None:
        return part[:0]
    if isinstance(rows, Tensor):
        return grad.index_select(0, (rows + start).to(grad.device)).to_dense()
    whole = grad.to_dense() if grad.dim() else grad.view(1)
    return whole[start : start + len(part)]
