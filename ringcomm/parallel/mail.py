"""What passes between the stages of a pipeline: messages in the order of a schedule, and what they look like."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.errors import refuse
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.schedule import Message, Schedule

__all__ = ["Format", "Mail"]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # that have gradients
DIMENSIONS = 8  # at most


class Format(NamedTuple):
    """What passes a boundary, in both directions."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def packed(self) -> list[int]:
        return [DTYPES.index(self.dtype), len(self.shape), *self.shape, *[0] * (DIMENSIONS - len(self.shape))]

    @classmethod
    def unpacked(cls, numbers: list[int]) -> "Format":
        dtype, dimensions, *shape = numbers
        return cls(DTYPES[dtype], tuple(shape[:dimensions]))


class Mail:
    """What one run through a pipeline sends and receives, begun in the order of `schedule.messages`.

    In that order nothing that has begun needs what begins later. So whatever has begun may be waited for, and it makes
    no difference whether the backend keeps messages until there is a receiver, or how it tells them apart.

    Sends and receives run in the background. A receive begins as early as the order allows; of each, no more are under
    way than there are ranks, which is as many micro-batches as 1F1B has in flight.

    Args:
        axis: the ranks of the pipeline
        schedule: whose messages they are
        order: those of this rank
        formats: of the boundaries, as far as they are known; the first message of another one is preceded by a letter
            of 80 bytes that tells it
        device: where to receive
    """

    def __init__(
        self, axis: Axis, schedule: Schedule, order: Sequence[Message], formats: dict[int, Format], device: torch.device
    ) -> None:
        self._axis, self._schedule, self._formats, self._device = axis, schedule, formats, device
        self._order = deque(order)
        self._handed: dict[Message, Tensor] = {}  # from one chunk of this rank to the next
        self._coming: dict[Message, tuple[dist.Work, Tensor]] = {}
        self._going: deque[tuple[dist.Work, Tensor]] = deque()
        self._look_ahead()

    def receive(self, message: Message) -> Tensor:
        """Return what came, which nobody else has."""
        if message in self._handed:
            return self._handed.pop(message)
        while message not in self._coming:
            self._begin_receive()
        work, tensor = self._coming.pop(message)
        work.wait()
        self._look_ahead()
        return tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Let the tensor go, which must not be changed any more."""
        _, receiver = self._schedule.ends(message)
        if receiver == self._axis.rank:
            self._handed[message] = tensor
            return
        while self._order[0] != message:
            self._begin_receive()
        self._order.popleft()
        self._agree(message.boundary, tensor, receiver)
        self._begin_send(tensor.contiguous(), receiver)
        self._look_ahead()

    def close(self) -> None:
        """Return when everything has been sent."""
        while self._going:
            self._end_send()

    def _look_ahead(self) -> None:
        """Begin the receives that come next, so that no sender waits while this rank computes."""
        while self._order and len(self._coming) < self._axis.size:
            sender, _ = self._schedule.ends(self._order[0])
            if sender == self._axis.rank or self._order[0].boundary not in self._formats:
                break
            self._begin_receive()

    def _begin_receive(self) -> None:
        message = self._order.popleft()
        source = self._axis.ranks[self._schedule.ends(message)[0]]
        if message.boundary not in self._formats:
            numbers = torch.empty(2 + DIMENSIONS, dtype=torch.int64, device=self._device)
            dist.recv(numbers, source, group=self._axis.group)
            self._formats[message.boundary] = Format.unpacked(numbers.tolist())
        dtype, shape = self._formats[message.boundary]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        work = dist.irecv(tensor, source, group=self._axis.group)
        self._coming[message] = cast(dist.Work, work), tensor

    def _begin_send(self, tensor: Tensor, receiver: int) -> None:
        work = dist.isend(tensor, self._axis.ranks[receiver], group=self._axis.group)
        self._going.append((cast(dist.Work, work), tensor))
        if len(self._going) > self._axis.size:
            self._end_send()

    def _end_send(self) -> None:
        work, _ = self._going.popleft()
        work.wait()

    def _agree(self, boundary: int, tensor: Tensor, receiver: int) -> None:
        """Tell the receiver what will pass the boundary, or see that it is as told."""
        format_ = Format(tensor.dtype, tuple(tensor.shape))
        known = self._formats.get(boundary)
        if known is None:
            if format_.dtype not in DTYPES or len(format_.shape) > DIMENSIONS:
                what = f"what stage {boundary} returns"
                raise refuse(what, f"at most {DIMENSIONS} dimensions of one of {DTYPES}", tensor_words(format_))
            self._formats[boundary] = format_
            self._begin_send(torch.tensor(format_.packed(), device=self._device), receiver)
        elif known != format_:
            what = f"what stage {boundary} returns for micro-batches of the same shape"
            raise refuse(what, tensor_words(known), tensor_words(format_))


def tensor_words(format_: Format) -> str:
    return f"{format_.dtype} of shape {format_.shape}"
