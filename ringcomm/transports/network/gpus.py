"""Sums of arrays on the GPUs of several hosts: only the data between hosts passes through host memory."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from ringcomm.devices.contract import Device
from ringcomm.errors import Aborted, RingcommError
from ringcomm.native import check, ffi, lib
from ringcomm.transports.blocks import Bytes
from ringcomm.transports.contract import CollectiveCall, LocalTransport, Transport
from ringcomm.transports.core import NativeTransport
from ringcomm.transports.cuda.group import Unreachable
from ringcomm.transports.cuda.hosts import HostGpus
from ringcomm.transports.network.layout import HostLayout
from ringcomm.transports.waits import Deadline
from ringcomm.types import COLLECTIVES, premul_sum, reduction

__all__ = ["GpuSums"]

log = logging.getLogger("ringcomm")

T = TypeVar("T")
Split = Callable[[int | None, int], Transport | None]

SUM, AVG, PREMUL = (reduction(op)[0] for op in ("sum", "avg", premul_sum(1.0)))
# Seconds added to timeouts inside a host: its ranks may wait for another host, and report the cause more precisely.
MARGIN = 1.0
ANSWER = 0.5  # seconds in which the failure of another rank arrives


class GpuSums:
    """One rank's part in the all_reduce of `group`, whose ranks on this host are `local`."""

    def __init__(
        self, group: NativeTransport, split: Split, local: LocalTransport, layout: HostLayout, device: Device
    ) -> None:
        self._group, self._split, self._local, self._layout, self._device = group, split, local, layout, device
        self._connected: bool | None = None  # None: not tried yet
        self._gpus: HostGpus | None = None
        self._rail: Transport | None = None

    def close(self) -> bool:
        return (not self._gpus or self._gpus.close()) and (not self._rail or self._rail.close())

    def all_reduce(self, call: CollectiveCall, timeout: float) -> bool:
        """Reduce on the GPUs of each host, between the hosts, and gather on each host.

        Collective. False: the GPUs of a host do not reach each other, and nothing was done.
        """
        if not self._connect():
            return False
        deadline = Deadline(timeout)
        group = self._group
        arguments = call._replace(source=ffi.cast("void *", call.source), target=ffi.cast("void *", call.target))
        check(lib.rc_agree_on_gpus(group.handle, COLLECTIVES["all_reduce"].code, (arguments,), timeout))
        try:
            self._move(call, deadline)
        except RingcommError:
            raise
        except BaseException as interrupt:  # a signal: the other ranks wait
            with suppress(RingcommError):
                group.fail(Aborted(f"rank {group.rank} was interrupted by a signal ({interrupt!r})", rank=group.rank))
            raise
        return True

    def _connect(self) -> bool:
        """Return whether the GPUs of every host reach each other. Collective, the first time."""
        if self._connected is None:
            gpus: list[HostGpus] = []

            def connect() -> bool:
                with suppress(Unreachable):
                    gpus.append(HostGpus(self._local, self._device))
                return bool(gpus)

            connected = all(self._group.run_on_all("split", connect))
            self._gpus = gpus[0] if gpus else None
            if connected:
                color = self._layout.local_rank if self._layout.rail else None
                self._rail = self._split(color, self._layout.host)
            else:
                log.warning("arrays on GPUs of several hosts are staged through host memory")
            self._connected = connected
        return self._connected

    def _move(self, call: CollectiveCall, deadline: Deadline) -> None:
        gpus, item = self._gpus, lib.rc_dtype_bytes(call.dtype)
        assert gpus
        slices, local_rank = self._layout.slices(call.count), self._layout.local_rank
        size, own = slices[local_rank] * item, call.target + sum(slices[:local_rank]) * item
        op = SUM if call.op == AVG else call.op

        def inside(collective: str, source: int, target: int, op: int) -> None:
            arithmetic = call.dtype, op, call.factor
            self._on_host(lambda: gpus.run(collective, source, target, slices, arithmetic, deadline.left() + MARGIN))

        inside("reduce_scatter", call.source, own, op)
        mine = self._on_host(lambda: gpus.download(own, size))
        if self._rail and size:
            self._between(mine, call, SUM if op == PREMUL else op, deadline)
        self._on_host(lambda: gpus.upload(mine, own))
        inside("all_gather", own, call.target, SUM)

    def _between(self, mine: Bytes, call: CollectiveCall, op: int, deadline: Deadline) -> None:
        """Reduce between the hosts."""
        rail, data = self._rail, ffi.from_buffer(mine)
        assert rail
        count = mine.size // lib.rc_dtype_bytes(call.dtype)
        on_rail = CollectiveCall(data, data, count, call.dtype, op)
        self._among(self._layout.rail, lambda: rail.fused["all_reduce"](on_rail, deadline.left()))
        if call.op == AVG:
            check(lib.rc_reduce(data, [data], 1, count, call.dtype, AVG, self._group.size))

    def _on_host(self, action: Callable[[], T]) -> T:
        return self._among(self._layout.local_ranks, action)

    def _among(self, ranks: Sequence[int], action: Callable[[], T]) -> T:
        """Return `action()`, which involves these ranks; if it fails, all ranks of the group raise that."""
        try:
            return action()
        except RingcommError as error:
            group = self._group
            rank = None if error.rank is None or error.group else ranks[error.rank]
            if rank != group.rank:  # perhaps a failure of the group, of which this rank has not heard
                self._await_failure()
            group.check()
            text = str(error) if rank is None else f"rank {rank}, in all_reduce on GPUs: {error}"
            failure = type(error)(text, rank=group.rank if error.rank is None else rank)
            group.fail(failure)
            group.check()
            raise failure from error

    def _await_failure(self) -> None:
        deadline = Deadline(ANSWER)
        while not deadline.passed():
            self._group.check()
            time.sleep(1e-3)
