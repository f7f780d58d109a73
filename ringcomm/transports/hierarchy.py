"""Ranks on several hosts, some of them together on one: shared memory inside a host, MPI between hosts."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from ringcomm.algorithms import pairwise
from ringcomm.algorithms.schedule import NOBODY, Lengths, even
from ringcomm.algorithms.select import MPI, Choice
from ringcomm.errors import Aborted, RingcommError
from ringcomm.native import NULL, ffi, lib
from ringcomm.store import ranks
from ringcomm.transports.blocks import Blockwise, Bytes, Steps
from ringcomm.transports.contract import Pending, Transport
from ringcomm.transports.cuda_host import GpusOfHost, OnGpus
from ringcomm.transports.group import Membership
from ringcomm.transports.lane import Lane, Wait, combine
from ringcomm.transports.mpi import ANSWER, AVG, PREMUL, SUM, MpiTransport
from ringcomm.transports.shm import ShmTransport
from ringcomm.transports.stages import Hosts, Rows, Stages
from ringcomm.transports.waits import INFINITE, Deadline

__all__ = ["HierarchicalTransport", "assemble"]

# Seconds that a rank waits longer for those of its host: they may wait for another host, and know better what is wrong.
GRACE = 1.0


class HierarchicalTransport(MpiTransport):
    """One rank's end of a group that spans hosts; `local` are the ranks of its own.

    Groups meet, fail and send messages as those of MPI. Only the data of collectives takes other ways.
    """

    def __init__(self, membership: Membership, lane: Lane, choice: Choice, local: ShmTransport, hosts: Hosts) -> None:
        self._local, self._hosts = local, hosts
        self._choice_on_lanes = choice.sharing(hosts.lanes)
        self._gpus = GpusOfHost(local)
        self._across = lane.split(hosts.place if hosts.place < hosts.lanes else None, hosts.host, membership.timeout)
        super().__init__("shm+mpi", membership, lane, choice)

    def _part(self, group: int | None, rank: int) -> Any:
        return super()._part(group, rank), self._local.split(group, rank)

    def _child(self, part: Any, membership: Membership) -> Transport:
        lane, local = part
        mine = [self._members.index(member) for member in membership.members]
        hosts = [self._hosts.of(rank)[0] for rank in mine]
        return assemble(membership, lane, self._choice, local, hosts)

    def allocate(self, words: str, size: int) -> Any:
        """Return zeros that the peers of this host reach directly."""
        return self._ask(words, np.empty(0, np.uint8), lambda _: self._local.allocate(words, size))

    def close(self) -> bool:
        if self._queue:  # calls inside the host end
            with suppress(RingcommError):
                self._local.abort(f"rank {self.rank} closed the communicator")
        return super().close() and self._gpus.close() and self._local.close()

    def _lanes(self) -> list[Lane]:
        return [lane for lane in (self._lane, self._across) if lane]

    def _fail(self, error: RingcommError, tell: bool = True) -> None:
        first = self._failure is None
        super()._fail(error, tell)
        if first:
            with suppress(RingcommError):  # it may have failed before
                self._local.abort(str(error))

    # --- The data -----------------------------------------------------------------------------------------------------

    def _move(self, call: Blockwise, source: Bytes, target: Bytes, op: int, wait: Wait, deadline: Deadline) -> Steps:
        if self._choice.name == MPI:
            return super()._move(call, source, target, op, wait, deadline)
        item, dtype = call.item, call.dtype

        def inside(collective: str, source: Bytes, target: Bytes, rows: Rows | None, root: int) -> Steps:
            counts = NULL if rows is None else ffi.new("uint64_t[]", list(rows))
            block = source if collective in ("broadcast", "gather", "all_gather") else target
            count = 0 if collective == "all_to_all" else block.size // item
            memory = (ffi.from_buffer(data) if data.size else NULL for data in (source, target))
            return self._inside(collective, (*memory, count, dtype, op, 1.0, root, counts), deadline)

        def across(collective: str, source: Bytes, target: Bytes, rows: Rows | None, root: int) -> Steps:
            return self._between(collective, source, target, rows, dtype, op, root, wait)

        def apart(source: Bytes, target: Bytes) -> Steps:
            lengths = Lengths(tuple(call.rows), tuple(call.come))
            near = frozenset(self._hosts.here)
            return self._lane.collective(pairwise.all_to_all, source, target, lengths, dtype, op, 0, wait, near)

        return Stages(self._hosts, call, source, target, inside, across, apart).run()

    def _between(
        self,
        collective: str,
        source: Bytes,
        target: Bytes,
        rows: Rows | None,
        dtype: int,
        op: int,
        root: int,
        wait: Wait,
    ) -> Steps:
        """Do a collective of the ranks of this lane, if this rank is on one."""
        lane = self._across
        if lane is None:
            return

        def wait_on_lane(ready: Callable[[], bool], peers: Sequence[int]) -> Steps:
            """Wait for peers that are numbered as on the lane: by their hosts."""
            return wait(ready, [self._hosts.ranks[host][self._hosts.place] for host in {*peers} - {NOBODY}])

        item = lib.rc_dtype_bytes(dtype)
        lengths = Lengths(even(source.size // item, lane.size) if rows is None else tuple(rows))
        algorithm = self._choice_on_lanes.of(collective, lane.size, lengths, item)
        self._way = f"{algorithm.name} between hosts", 1
        yield from lane.collective(algorithm, source, target, lengths, dtype, op, root, wait_on_lane)

    # --- The data of GPUs ---------------------------------------------------------------------------------------------

    def start_on_gpus(self, source: OnGpus, target: OnGpus, *call: Any) -> Pending:
        """Queue an all_reduce of arrays on GPUs."""
        queued = self._submit("all_reduce", lambda epoch: self._collective("all_reduce", epoch, source, target, *call))
        self._work_on()
        return queued

    def _carry_out(self, call: Blockwise, epoch: int, deadline: Deadline) -> Steps:
        if not isinstance(call.source, OnGpus):
            return super()._carry_out(call, epoch, deadline)
        return self._all_reduce_on_gpus(call, epoch, deadline)

    def _all_reduce_on_gpus(self, call: Blockwise, epoch: int, deadline: Deadline) -> Steps:
        """The GPUs of a host add up; what goes between hosts, and only that, goes through host memory."""
        source, target, device = call.source.address, call.target.address, call.source.device
        device.wait(device.stream(), call.source.ready)
        if not self._gpus.meet(device):
            yield from self._all_reduce_staged(call, epoch, deadline)
            return
        wait = partial(self._wait, call.said, epoch, deadline, "in the middle of it this came to a stop:")
        slices, place = self._hosts.slices(call.count), self._hosts.place
        mine = np.empty(slices[place] * call.item, np.uint8)
        own = target + sum(slices[:place]) * call.item

        def inside(collective: str, source: int, target: int, op: int) -> Steps:
            arithmetic, limit = (call.dtype, op, call.factor), deadline.left() + GRACE
            return self._named(self._gpus.run(collective, device, source, target, slices, arithmetic, limit))

        op = SUM if call.op == AVG else call.op
        yield from inside("reduce_scatter", source, own, op)
        device.download(own, mine)
        yield from self._between("all_reduce", mine, mine, None, call.dtype, SUM if op == PREMUL else op, 0, wait)
        if call.op == AVG and mine.size:
            combine(mine, [mine], call.dtype, AVG, self.size)
        device.upload(mine, own)
        yield from inside("all_gather", own, target, SUM)

    def _all_reduce_staged(self, call: Blockwise, epoch: int, deadline: Deadline) -> Steps:
        """The same where the GPUs of this host do not reach each other, whatever those of other hosts do."""
        device, address = call.source.device, call.target.address
        data = np.empty(call.count * call.item, np.uint8)
        device.download(call.source.address, data)
        staged = copy(call)
        staged.source = staged.target = ffi.from_buffer(data)
        yield from super()._carry_out(staged, epoch, deadline)
        device.upload(data, address)

    # --- Inside the host ----------------------------------------------------------------------------------------------

    def _inside(self, collective: str, facts: tuple[Any, ...], deadline: Deadline) -> Steps:
        """Do a collective of the ranks of this host."""
        return self._named(self._steps_inside(collective, facts, deadline))

    def _steps_inside(self, collective: str, facts: tuple[Any, ...], deadline: Deadline) -> Steps:
        limit = deadline.left() + GRACE
        call: Any = (*facts, limit)
        if self._queue.patient:
            self._local.fused[collective](*call)
            return
        pending = self._local.start(collective, *call)
        try:
            while not pending.done():
                yield
        except BaseException:  # a signal: nothing may use the memory of the call any more
            self._local.abort(f"rank {self.rank} was interrupted")
            with suppress(RingcommError):
                pending.wait(limit)
            raise
        pending.wait(limit)

    def _named(self, steps: Steps) -> Steps:
        """Go through steps of the ranks of this host; whom they name is named as all ranks know it."""
        try:
            yield from steps
        except RingcommError as error:
            if isinstance(error, Aborted):  # by a rank that knows of a failure: all ranks are told which
                told = Deadline(ANSWER)
                yield from self.until(told.passed, Deadline(INFINITE), "a collective of the host", list)
            here = self._hosts.here
            rank = None if error.rank is None else here[error.rank]
            failure = type(error)(f"among {ranks(here)}, which are 0 to {len(here) - 1} there: {error}", rank=rank)
            with self.changed:
                self._fail(failure)
            raise failure from None


def assemble(membership: Membership, lane: Lane, choice: Choice, local: ShmTransport, hosts: list[int]) -> Transport:
    """Make the transport of a group whose ranks live on these hosts: of one kind of memory, if one is enough."""
    places: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        places.setdefault(host, []).append(rank)
    by_host = list(places.values())
    if len(by_host) == 1:
        lane.free()
        return local
    if max(map(len, by_host)) == 1:
        local.close()
        return MpiTransport("mpi", membership, lane, choice)
    host = next(host for host, there in enumerate(by_host) if lane.rank in there)
    found = Hosts(by_host, host, local.rank)
    return HierarchicalTransport(membership, lane, choice, local, found)
