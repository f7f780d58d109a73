"""The GPUs of one host, in a collective of several hosts."""

from collections.abc import Sequence

import numpy as np

from ringcomm.devices.contract import Device, Memory
from ringcomm.errors import RingcommError
from ringcomm.native import ffi
from ringcomm.transports.blocks import Blockwise, Bytes
from ringcomm.transports.contract import CollectiveCall, LocalTransport
from ringcomm.transports.cuda.group import CudaGroup

__all__ = ["HostGpus"]


class HostGpus:
    """One rank's end of them. The constructor is a collective of `local`, the group of the ranks of the host.

    Raises Unreachable on all of them if a GPU cannot access another's memory.
    """

    def __init__(self, local: LocalTransport, device: Device) -> None:
        self._local, self._device = local, device
        self._group = CudaGroup(local, device)
        self._stage: Memory | None = None  # pinned host memory for the data between hosts
        self._stage_bytes = 0
        self.close = self._group.close

    def run(
        self,
        collective: str,
        source: int,
        target: int,
        rows: Sequence[int],
        arithmetic: tuple[int, int, float],
        timeout: float,
    ) -> None:
        """Run a collective, `rows` elements of each rank, and wait for it. `arithmetic`: dtype, operation, factor."""
        local, counts = self._local, ffi.new("uint64_t[]", list(rows))
        arguments = CollectiveCall(source, target, 0, *arithmetic, counts=counts)
        call = Blockwise(local.rank, local.size, collective, arguments)
        launch = self._group.call(self._device, call, timeout, True)
        self._group.wait(launch, timeout)
        launch.wait(timeout)

    def download(self, address: int, size: int) -> Bytes:
        """Return a copy in pinned memory, which the next call overwrites."""
        try:
            if size > self._stage_bytes or self._stage is None:
                self._stage, self._stage_bytes = self._device.allocate_pinned(max(size, 1)), size
            stage = np.frombuffer(ffi.buffer(ffi.cast("char *", self._stage.address), max(size, 1)), np.uint8)[:size]
            self._device.download(address, stage)
        except RuntimeError as error:  # CUDA's
            raise RingcommError(f"{self._device.name} has failed: {error}") from error
        return stage

    def upload(self, data: Bytes, address: int) -> None:
        try:
            self._device.upload(data, address)
        except RuntimeError as error:
            raise RingcommError(f"{self._device.name} has failed: {error}") from error
