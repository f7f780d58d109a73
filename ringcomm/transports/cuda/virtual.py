"""Several ranks on one device, whose kernels run in one launch: they wait for memory only."""

from typing import Any

import numpy as np

from ringcomm.devices.contract import Device, Event
from ringcomm.errors import RingcommError
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.contract import CollectiveCall
from ringcomm.transports.cuda.arena import Arena
from ringcomm.transports.cuda.kernels import REASONS, plan_launch

__all__ = ["VirtualAllReduce"]

TIMEOUT = 10.0  # seconds


class VirtualAllReduce:
    """An all_reduce of ranks of one process; `sources` and `targets` are the addresses of one array of each.

    It can be launched repeatedly. `kernel` replaces the one that its size would choose.
    """

    def __init__(
        self, device: Device, sources: list[int], targets: list[int], count: int, dtype: int, op: int, kernel: str = ""
    ) -> None:
        size = len(sources)
        self._device = device
        self._arenas = [Arena(device, rank, size) for rank in range(size)]
        arguments = []
        for arena, source, target in zip(self._arenas, sources, targets, strict=True):
            arena.join([each.memory for each in self._arenas])
            call = Blockwise(arena.rank, size, "all_reduce", CollectiveCall(source, target, count, dtype, op))
            self._plan = plan_launch(call, device.shape, kernel)
            arguments.append(arena.arguments(call, self._plan, 0, TIMEOUT))
        self.kernel, self.blocks = self._plan.kernel, self._plan.blocks
        data = np.concatenate(arguments).tobytes()
        self._args = device.allocate(len(data), "the arguments of a launch")
        device.write(self._args, 0, data)
        device.prepare(self._plan.variant)

    def launch(self, stream: Any) -> Event:
        """Queue the call. The caller keeps it and its arrays until the event is reached."""
        self._device.launch_virtual(self._plan.variant, self._args, len(self._arenas), self.blocks, stream)
        return self._device.record(stream)

    def check(self) -> None:
        """Raise the failure of a launch that has ended."""
        for arena in self._arenas:
            if arena.control.failed:
                reason, peer = REASONS[arena.control.reason], arena.control.peer
                raise RingcommError(f"virtual rank {arena.rank}: {reason}, of rank {peer}")
