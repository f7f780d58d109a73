"""Collectives of arrays on the GPUs of several hosts: only the data between hosts passes through host memory.

The stages inside a host are kernels, those between hosts are staged (gpu_programs.py).
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ringcomm.algorithms.schedule import Block, Copy
from ringcomm.algorithms.select import AlgorithmSelector
from ringcomm.devices.contract import Memory
from ringcomm.devices.device import Device
from ringcomm.errors import RingcommError
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.calls import CollectiveCall
from ringcomm.transports.contract import LocalTransport, Transport
from ringcomm.transports.cuda.group import CudaGroup, Unreachable
from ringcomm.transports.deadline import Deadline
from ringcomm.transports.network.gpu_programs import OnGpus
from ringcomm.transports.network.host_layout import HostLayout
from ringcomm.transports.network.steps import RailCollective
from ringcomm.transports.staged.staging import Staging
from ringcomm.types import COLLECTIVES, CPU_DTYPES, premul_sum, reduction

__all__ = ["HostsGpus"]

log = logging.getLogger("ringcomm")

Split = Callable[[int | None, int], Transport | None]

SUM, AVG, PREMUL = (reduction(op)[0] for op in ("sum", "avg", premul_sum(1.0)))
# Seconds added to timeouts inside a host: its ranks may wait for another host, and report the cause more precisely.
MARGIN = 1.0
ANSWER = 0.5  # seconds in which the failure of another rank arrives


class HostsGpus:
    """One rank's part in the collectives of `group`, whose ranks on this host are `local`."""

    def __init__(
        self,
        group: Transport,
        split: Split,
        local: LocalTransport,
        layout: HostLayout,
        selector: AlgorithmSelector,
        staging: Staging,
    ) -> None:
        self._group, self._split, self._local, self._layout = group, split, local, layout
        self._selector, self._staging = selector, staging
        self._connected: bool | None = None  # None: not tried yet
        self._gpus: CudaGroup | None = None
        self._rail: Transport | None = None
        self._scratch: Memory | None = None
        self._scratch_bytes = 0

    def close(self) -> bool:
        """Close, after the group: then a call of another thread ends."""
        if self._staging.called_here() or (self._rail and not self._rail.close()):
            return False
        with self._staging.alone():
            self._scratch, self._scratch_bytes = None, 0
            if self._gpus and not self._gpus.close():
                return False
            self._gpus = None
        return True

    def run(self, device: Device, name: str, call: CollectiveCall, timeout: float) -> bool:
        """Do a collective of arrays on a device. False: all data has to be staged in host memory, and nothing was done.

        That is so if the GPUs of a host do not reach each other, if each host has one rank, for sums that the CPU
        cannot compute, and for all_to_all, most of whose data goes to other hosts.
        """
        row = COLLECTIVES[name]
        staged = row.given == row.got == "BLOCKS" or (row.reduces and call.dtype not in CPU_DTYPES)
        if staged or max(map(len, self._layout.ranks)) == 1 or not self._connect():
            return False
        assert self._gpus
        self._gpus.check_device(device)
        deadline = Deadline(timeout)
        arguments = call._replace(source=ffi.cast("void *", call.source), target=ffi.cast("void *", call.target))
        check(lib.rc_agree_on_gpus(self._group.handle, row.code, (arguments,), timeout))
        blocks = Blockwise(self._group.rank, self._group.size, name, call)
        program = OnGpus(self._layout, blocks, call.source == call.target, self._selector)
        program.in_stages()
        memories = call.source, call.target, self._reserve(program.scratch * blocks.item)
        for step in program.steps:
            self._do(name, step, call, memories, blocks.item, deadline)
        self._staging.finish()
        return True

    def _connect(self) -> bool:
        """Return whether the GPUs of every host reach each other. Collective, the first time."""
        if self._connected is None:
            gpus: list[CudaGroup] = []

            def connect() -> bool:
                with suppress(Unreachable):
                    gpus.append(CudaGroup(self._local, self._staging.device))
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

    def _reserve(self, size: int) -> int:
        """Return memory on the GPU for the data between two steps."""
        if size > self._scratch_bytes:
            self._scratch, self._scratch_bytes = None, 0
            text, device = "memory for a collective of several hosts", self._staging.device
            self._scratch = self._staging.allocate(lambda: device.allocate(size, text))
            self._scratch_bytes = size
        return self._scratch.address if self._scratch else 0

    def _do(
        self, name: str, step: Any, call: CollectiveCall, memories: Sequence[int], item: int, deadline: Deadline
    ) -> None:
        def at(block: Block) -> int:
            return memories[block.memory] + block.begin * item if block.length else 0

        staging = self._staging
        if isinstance(step, Copy):
            staging.device.copy(at(step.target), at(step.source), step.source.length * item, staging.stream)
            return
        between = isinstance(step, RailCollective)
        op = call.op if COLLECTIVES[step.collective].reduces else SUM
        if op == AVG or (op == PREMUL and between):
            op = SUM
        counts = ffi.new("uint64_t[]", step.counts) if step.counts else NULL
        part = CollectiveCall(
            at(step.source), at(step.target), step.count, call.dtype, op, call.factor, step.root, counts
        )
        if between:
            self._between(name, step.collective, part, call.op == AVG, deadline)
        else:
            self._inside(name, step.collective, part, deadline)

    def _inside(self, name: str, collective: str, call: CollectiveCall, deadline: Deadline) -> None:
        gpus = self._gpus
        assert gpus
        call = call._replace(source=ffi.cast("void *", call.source), target=ffi.cast("void *", call.target))
        device, stream, timeout = self._staging.device, self._staging.stream, deadline.left() + MARGIN

        def run() -> None:
            launch = gpus.call(device, collective, call, timeout, awaited=True, async_op=False, stream=stream)
            gpus.wait(launch.number, timeout)
            launch.wait(timeout)

        self._among(name, self._layout.local_ranks, run)

    def _between(self, name: str, collective: str, call: CollectiveCall, averages: bool, deadline: Deadline) -> None:
        rail = self._rail
        assert rail

        def divide(data: Any, count: int) -> None:
            check(lib.rc_reduce(data, [data], 1, count, call.dtype, AVG, self._group.size))

        last = divide if averages and COLLECTIVES[collective].reduces else None
        self._among(
            name,
            self._layout.rail,
            lambda: self._staging.collective(rail, collective, call, deadline.left(), agreed=True, divide=last),
        )

    def _among(self, name: str, ranks: Sequence[int], action: Callable[[], None]) -> None:
        """Do what involves these ranks; if it fails, all ranks of the group raise that."""
        try:
            action()
        except RingcommError as error:
            group = self._group
            group.check()  # an error of the group has its ranks
            rank = None if error.rank is None or error.group else ranks[error.rank]
            if rank != group.rank:  # perhaps a failure of the group, of which this rank has not heard
                self._await_failure()
            group.check()
            text = str(error) if rank is None else f"rank {rank}, in {name} on GPUs: {error}"
            failure = type(error)(text, rank=group.rank if error.rank is None else rank)
            group.fail(failure)
            group.check()
            raise failure from error

    def _await_failure(self) -> None:
        deadline = Deadline(ANSWER)
        while not deadline.passed():
            self._group.check()
            time.sleep(1e-3)
