"""The GPUs of one host, in a collective of several hosts."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ringcomm.devices.contract import Device, Event
from ringcomm.errors import Aborted
from ringcomm.native import ffi
from ringcomm.transports.blocks import Blockwise, Steps
from ringcomm.transports.cuda_ipc import SHORTEST, CudaGroup, Unreachable
from ringcomm.transports.shm import ShmTransport

__all__ = ["GpusOfHost", "OnGpus"]

log = logging.getLogger("ringcomm")


@dataclass(frozen=True)
class OnGpus:
    """An array on a GPU, as a call has it that waits in a queue: the thread that carries it out has other streams."""

    device: Device
    address: int
    ready: Event


class GpusOfHost:
    """One rank's end of them; `local` is a group of the ranks of the host."""

    def __init__(self, local: ShmTransport) -> None:
        self._local = local
        self._group: CudaGroup | None = None
        self._reachable = True

    def meet(self, device: Device) -> bool:
        """Say whether they reach each other. A collective of the host, if it is the first."""
        if self._group is None and self._reachable:
            try:
                self._group = CudaGroup(self._local, device)
            except Unreachable as error:
                log.warning("arrays on GPUs go through host memory: %s", error)
                self._reachable = False
        return self._group is not None

    def run(
        self,
        collective: str,
        device: Device,
        source: int,
        target: int,
        rows: Sequence[int],
        arithmetic: tuple[int, int, float],
        timeout: float,
    ) -> Steps:
        """Do a collective of so many elements of each rank. `arithmetic`: dtype, operation, factor."""
        group, local = self._group, self._local
        assert group
        counts = ffi.new("uint64_t[]", list(rows))
        call = Blockwise(local.rank, local.size, collective, source, target, 0, *arithmetic, 0, counts)
        launched = group.call(device, call, source, target, timeout, True)
        try:
            while not launched.done():
                yield
        except BaseException as error:  # a signal: nothing may use the memory of the call any more
            group.give_up(Aborted(f"rank {local.rank} was interrupted: {error!r}", rank=local.rank))
            while not launched.done():
                time.sleep(SHORTEST)
            raise
        launched.wait(timeout)

    def close(self) -> bool:
        return self._group is None or self._group.close()
