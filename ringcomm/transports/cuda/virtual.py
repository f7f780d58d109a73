"""Several ranks on one device, whose kernels run in one launch: memory is all that they wait for."""

from typing import Any

import numpy as np

from ringcomm.devices.contract import Device, Event
from ringcomm.errors import RingcommError
from ringcomm.native import NULL
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.cuda.arena import Arena
from ringcomm.transports.cuda.calls import KERNELS, REASONS, plan

__all__ = ["VirtualCall", "VirtualRanks"]


class VirtualRanks:
    """Ranks of one process that share a device."""

    def __init__(self, device: Device, ranks: int, timeout: float = 10.0) -> None:
        self.device, self.timeout = device, timeout
        self.arenas = [Arena(device, rank, ranks) for rank in range(ranks)]
        for arena in self.arenas:
            arena.join([each.memory for each in self.arenas])


class VirtualCall:
    """A collective of all ranks on arrays at these addresses, one for each; it can be launched again and again."""

    def __init__(
        self,
        ranks: VirtualRanks,
        collective: str,
        sources: list[int],
        targets: list[int],
        count: int,
        dtype: int,
        op: int,
        kernel: str = "",
    ) -> None:
        """`kernel`: that does it, in place of the one that is chosen for its length."""
        self._ranks, self._device = ranks, ranks.device
        arguments = []
        for arena, source, target in zip(ranks.arenas, sources, targets, strict=True):
            size = len(ranks.arenas)
            call = Blockwise(arena.rank, size, collective, source, target, count, dtype, op, 1.0, 0, NULL)
            self._plan = plan(call, self._device.shape, kernel)
            arguments.append(arena.arguments(call, self._plan, source, target, 0, ranks.timeout))
        self.kernel, self.blocks = self._plan.kernel, self._plan.blocks
        words = np.concatenate(arguments).tobytes()
        self._args = self._device.allocate(len(words), "the arguments of a launch")
        self._device.write(self._args, 0, words)
        self._device.prepare(KERNELS[self.kernel], self._plan.dtype, self._plan.op)

    def launch(self, stream: Any) -> Event:
        """Queue the call. It, its ranks and its arrays have to be kept until the event is reached."""
        size = len(self._ranks.arenas)
        call = KERNELS[self.kernel], self._plan.dtype, self._plan.op
        self._device.launch_virtual(*call, self._args, size, self.blocks, stream)
        return self._device.record(stream)

    def check(self) -> None:
        """Raise what has gone wrong in the launches that are done."""
        for arena in self._ranks.arenas:
            if arena.control.failed:
                reason, peer = REASONS[arena.control.reason], arena.control.peer
                raise RingcommError(f"virtual rank {arena.rank}: {reason}, of rank {peer}")
