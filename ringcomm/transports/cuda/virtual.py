"""Several ranks on one device, whose kernels run in one launch: they wait for memory only."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringcomm.devices.contract import Shape
from ringcomm.devices.device import Device
from ringcomm.errors import RingcommError, refuse
from ringcomm.native import lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.calls import CollectiveCall
from ringcomm.transports.cuda.arena import Arena
from ringcomm.transports.cuda.kernels import LaunchPlan, plan_launch
from ringcomm.transports.cuda.symmetric import NOT_SYMMETRIC, BufferLocation, DeviceBuffer
from ringcomm.types import REASONS

__all__ = ["VirtualCall", "VirtualRanks"]


class VirtualRanks:
    """Ranks of one process on one device, with an arena each."""

    def __init__(self, device: Device, size: int, timeout: float = 10.0, shape: Shape | None = None) -> None:
        if size > lib.RC_VIRTUAL_RANKS:
            raise refuse("virtual ranks", f"at most {lib.RC_VIRTUAL_RANKS}", size)
        self.device, self.size, self._timeout = device, size, timeout
        self._limits = device.limits(size)
        shape = shape or device.shape_for(size, device.gpu.multiprocessors)
        self._arenas = [Arena(device, rank, size, shape) for rank in range(size)]
        for arena in self._arenas:
            arena.join([each.memory for each in self._arenas])

    def call(
        self,
        name: str,
        sources: Sequence[int],
        targets: Sequence[int],
        count: int,
        dtype: int,
        op: int = 0,
        factor: float = 1.0,
        root: int = 0,
        kernel: str = "",
        buffers: Sequence[DeviceBuffer] = (),
    ) -> "VirtualCall":
        """Return a collective of all ranks; `sources` and `targets` are the addresses of one array of each.

        `kernel` replaces the one that its size would choose. `buffers` are the symmetric buffers that hold the arrays.
        """
        arguments = []
        for arena, source, target in zip(self._arenas, sources, targets, strict=True):
            call = Blockwise(
                arena.rank, self.size, name, CollectiveCall(source, target, count, dtype, op, factor, root)
            )
            plan = plan_launch(call, arena.shape, self._limits, kernel)
            buffer = buffers[arena.rank] if buffers else None
            locations = locate(source, buffer), locate(target, buffer)
            arguments.append(arena.arguments(call, plan, self._timeout, locations))
        return VirtualCall(self, plan, np.concatenate(arguments).tobytes())

    def symmetric(self, size: int) -> list[DeviceBuffer]:
        """Return a symmetric buffer for each rank."""
        buffers = [DeviceBuffer(self.device, size, self.size, "a symmetric buffer") for _ in range(self.size)]
        addresses = np.array([buffer.memory.address for buffer in buffers], np.uint64).tobytes()
        for buffer in buffers:
            self.device.write(buffer.memory, buffer.bases - buffer.memory.address, addresses)
        return buffers

    def check(self) -> None:
        """Raise the failure of a launch that has ended; the next launch then finds cleared arenas."""
        for arena in self._arenas:
            if arena.control.failed:
                reason, peer = REASONS[arena.control.reason], arena.control.peer
                for each in self._arenas:
                    each.reset()
                raise RingcommError(f"virtual rank {arena.rank}: {reason}, of rank {peer}")


class VirtualCall:
    """A collective of virtual ranks, which can be launched repeatedly."""

    def __init__(self, ranks: VirtualRanks, plan: LaunchPlan, arguments: bytes) -> None:
        self.kernel, self.blocks = plan.kernel, plan.blocks
        self._ranks, self._variant = ranks, plan.variant  # the ranks keep the arenas
        self._args = arguments.ljust(lib.RC_VIRTUAL_RANKS * lib.rc_cuda_args_bytes(), b"\0")
        ranks.device.kernel(self._variant)  # loads it

    def launch(self, stream: Any) -> None:
        """Queue the call. The caller keeps it and its arrays until the stream has done it."""
        self._ranks.device.launch_virtual(self._variant, self._args, self._ranks.size, self.blocks, stream)


def locate(address: int, buffer: DeviceBuffer | None) -> BufferLocation:
    """Return the location of an array in a symmetric buffer, if there are both."""
    if buffer is None or not address:
        return NOT_SYMMETRIC
    return BufferLocation(buffer.bases, 1, address - buffer.memory.address)
