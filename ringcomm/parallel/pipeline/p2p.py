"""Point-to-point communication between the stages of a pipeline."""

from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.errors import refuse
from ringcomm.parallel.collectives import all_gathered, local_slice
from ringcomm.parallel.grid import Axis
from ringcomm.pipelining.schedule import P2PTransfer, PipelineSchedule

__all__ = ["P2PCommunicator", "TensorMeta"]


class TensorMeta(NamedTuple):
    """Dtype and shape of the tensors that cross a boundary, in both directions."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class P2PCommunicator:
    """Sends and receives activations and gradients during one run of a pipeline, in the order of `transfers(schedule)`.

    In that order an operation depends only on earlier ones. Waiting for any posted operation therefore never
    deadlocks, whether or not the backend buffers messages, and however it matches them.

    All operations are asynchronous. Receives are posted as early as the order allows, up to `axis.size`: the number of
    micro-batches that 1F1B keeps in flight. Those before a send are posted beyond that: one on two ranks of
    interleaved, none with any other schedule of `make_schedule`. At most `axis.size` sends are outstanding.

    Args:
        axis: the ranks of the pipeline
        schedule: the schedule
        order: this rank's transfers
        metadata: tensor metadata of the known boundaries; the first transfer over another one is preceded by a message
            with its metadata, which is then added
        device: device of the received tensors
        tp: the ranks with the same tensors as this rank. Each sends an equal part to its counterpart, and the receivers
            gather the parts (Narayanan et al., arXiv 2104.04473, section 4.1). None: each rank sends the whole tensor.
    """

    def __init__(
        self,
        axis: Axis,
        schedule: PipelineSchedule,
        order: Sequence[P2PTransfer],
        metadata: dict[int, TensorMeta],
        device: torch.device,
        tp: Axis | None = None,
    ) -> None:
        self._axis, self._schedule, self._metadata, self._device = axis, schedule, metadata, device
        self._tp = tp
        self._order = deque(order)
        self._local: dict[P2PTransfer, Tensor] = {}  # between two chunks of this rank
        self._receives: dict[P2PTransfer, tuple[dist.Work, Tensor]] = {}
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._prefetch()

    def recv(self, transfer: P2PTransfer) -> Tensor:
        """Return the received tensor; the caller owns it."""
        if transfer in self._local:
            return self._local.pop(transfer)
        while transfer not in self._receives:
            self._post_recv()
        work, tensor = self._receives.pop(transfer)
        work.wait()
        self._prefetch()
        return all_gathered(tensor, self._tp, 0).view(self._metadata[transfer.boundary].shape) if self._tp else tensor

    def send(self, transfer: P2PTransfer, tensor: Tensor) -> None:
        """Send a tensor, which must not change afterwards."""
        _, receiver = self._schedule.endpoints(transfer)
        if receiver == self._axis.rank:
            self._local[transfer] = tensor
            return
        while self._order[0] != transfer:
            self._post_recv()
        self._order.popleft()
        self._check_metadata(transfer.boundary, tensor, receiver)
        self._post_send(local_slice(tensor.flatten(), self._tp, 0) if self._tp else tensor.contiguous(), receiver)
        self._prefetch()

    def wait_sends(self) -> None:
        """Wait until all sends are complete."""
        while self._sends:
            self._wait_send()

    def _prefetch(self) -> None:
        """Post the next receives, so that no sender waits while this rank computes."""
        while self._order and len(self._receives) < self._axis.size:
            sender, _ = self._schedule.endpoints(self._order[0])
            if sender == self._axis.rank or self._order[0].boundary not in self._metadata:
                break
            self._post_recv()

    def _post_recv(self) -> None:
        transfer = self._order.popleft()
        source = self._axis.ranks[self._schedule.endpoints(transfer)[0]]
        if transfer.boundary not in self._metadata:
            received: list[Any] = [None]
            dist.recv_object_list(received, source, group=self._axis.group)
            self._metadata[transfer.boundary] = received[0]
        dtype, shape = self._metadata[transfer.boundary]
        size = (prod(shape) // self._tp.size,) if self._tp else shape
        tensor = torch.empty(size, dtype=dtype, device=self._device)
        work = dist.irecv(tensor, source, group=self._axis.group)
        self._receives[transfer] = cast(dist.Work, work), tensor

    def _post_send(self, tensor: Tensor, receiver: int) -> None:
        work = dist.isend(tensor, self._axis.ranks[receiver], group=self._axis.group)
        self._sends.append((cast(dist.Work, work), tensor))
        if len(self._sends) > self._axis.size:
            self._wait_send()

    def _wait_send(self) -> None:
        work, _ = self._sends.popleft()
        work.wait()

    def _check_metadata(self, boundary: int, tensor: Tensor, receiver: int) -> None:
        """Send the metadata of the first tensor over a boundary; refuse a later tensor that differs."""
        meta = TensorMeta(tensor.dtype, tuple(tensor.shape))
        known = self._metadata.get(boundary)
        if known is None:
            if not meta.dtype.is_floating_point:
                raise refuse(f"output of stage {boundary}", "a floating-point dtype, which has gradients", meta)
            if self._tp:
                self._tp.divide(f"elements of the output of stage {boundary}, {meta.shape}", prod(meta.shape))
            self._metadata[boundary] = meta
            dist.send_object_list([meta], self._axis.ranks[receiver], group=self._axis.group)
        elif known != meta:
            raise refuse(f"output of stage {boundary} for micro-batches of the same shape", known, meta)
