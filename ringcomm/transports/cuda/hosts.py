"""The GPUs of one host, in a collective of several hosts."""

from collections.abc import Sequence

import numpy as np

from ringcomm.devices.contract import Device, Memory
from ringcomm.errors import RingcommError
from ringcomm.native import ffi
from ringcomm.transports.blocks import Blockwise, Bytes
from ringcomm.transports.cuda.group import CudaGroup
from ringcomm.transports.shm import ShmTransport

__all__ = ["GpusOfHost"]


class GpusOfHost:
    """One rank's end of them; `local` is a group of the ranks of the host. To make it is a collective of these.

    Raises Unreachable on all of them, if a GPU does not reach another.
    """

    def __init__(self, local: ShmTransport, device: Device) -> None:
        self._local, self._device = local, device
        self._group = CudaGroup(local, device)
        self._stage: Memory | None = None  # in host memory, for what goes between hosts
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
        """Do a collective of so many elements of each rank, and wait for it. `arithmetic`: dtype, operation, factor."""
        local, counts = self._local, ffi.new("uint64_t[]", list(rows))
        call = Blockwise(local.rank, local.size, collective, source, target, 0, *arithmetic, 0, counts)
        launched = self._group.call(self._device, call, source, target, timeout, True)
        self._group.until_done(launched, timeout)
        launched.wait(timeout)

    def download(self, address: int, size: int) -> Bytes:
        """Return what lies there, in memory that is the same at each call."""
        try:
            if size > self._stage_bytes or self._stage is None:
                self._stage, self._stage_bytes = self._device.shared_with_host(max(size, 1)), size
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
