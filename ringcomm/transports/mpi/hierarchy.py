"""Ranks on several hosts, some of them together on one: shared memory inside a host, MPI between hosts."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ringcomm.algorithms import pairwise
from ringcomm.algorithms.schedule import NOBODY, Lengths, even
from ringcomm.algorithms.select import MPI, Choice
from ringcomm.devices.contract import Device
from ringcomm.errors import Aborted, MismatchError, RingcommError
from ringcomm.native import NULL, ffi, lib
from ringcomm.store import ranks
from ringcomm.transports.blocks import NOTHING, Blockwise, Bytes, Said, Steps
from ringcomm.transports.contract import Transport
from ringcomm.transports.cuda.group import Unreachable
from ringcomm.transports.cuda.hosts import GpusOfHost
from ringcomm.transports.messages.group import Membership
from ringcomm.transports.mpi.lane import Lane, Wait, combine
from ringcomm.transports.mpi.stages import Hosts, Rows, Stages
from ringcomm.transports.mpi.transport import ANSWER, AVG, PREMUL, SUM, MpiTransport
from ringcomm.transports.shm import ShmTransport
from ringcomm.transports.waits import INFINITE, Deadline

__all__ = ["HierarchicalTransport", "assemble"]

log = logging.getLogger("ringcomm")

T = TypeVar("T")

# Seconds that a rank waits longer for those of its host: they may wait for another host, and know better what is wrong.
GRACE = 1.0


class HierarchicalTransport(MpiTransport):
    """One rank's end of a group that spans hosts; `local` are the ranks of its own.

    Groups meet, fail and send messages as those of MPI. Only the data of collectives takes other ways.
    """

    def __init__(self, membership: Membership, lane: Lane, choice: Choice, local: ShmTransport, hosts: Hosts) -> None:
        self._local, self._hosts = local, hosts
        self._choice_on_lanes = choice.sharing(hosts.lanes)
        self._gpus: GpusOfHost | None = None
        self._gpus_reach: bool | None = None  # None: they have not met
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
        return super().close() and (not self._gpus or self._gpus.close()) and self._local.close()

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

    # --- Arrays on GPUs -----------------------------------------------------------------------------------------------

    def gpus_meet(self, device: Device) -> bool:
        """Say whether the GPUs of every host reach each other. Collective, the first time."""
        if self._gpus_reach is None:
            gpus: list[GpusOfHost] = []

            def meet(_: object) -> None:
                with suppress(Unreachable):
                    gpus.append(GpusOfHost(self._local, device))

            words = "the first all_reduce on GPUs"
            self._ask(words, NOTHING, meet)
            reached = self._ask(words, np.full(1, len(gpus), np.uint8), lambda answers: [*map(bool, answers)])
            self._gpus_reach = all(reached) and self._choice.name != MPI
            self._gpus = gpus[0] if gpus else None
            if not self._gpus_reach:
                log.warning("arrays on GPUs of several hosts go through host memory")
        return self._gpus_reach

    def all_reduce_on_gpus(self, call: Blockwise, timeout: float) -> None:
        """The GPUs of a host add up; what goes between hosts, and only that, goes through host memory."""
        deadline = Deadline(self.limit(timeout))
        said = Said(f"{call.said.words} on GPUs", call.said.counts)
        self._complete(said.words, lambda epoch: self._meeting(said, deadline, epoch))
        gpus, source, target = self._gpus, int(call.source), int(call.target)
        assert gpus
        slices, place = self._hosts.slices(call.count), self._hosts.place
        size, own = slices[place] * call.item, target + sum(slices[:place]) * call.item
        op = SUM if call.op == AVG else call.op
        between = SUM if op == PREMUL else op

        def inside(collective: str, source: int, target: int, op: int) -> None:
            gpus.run(collective, source, target, slices, (call.dtype, op, call.factor), deadline.left() + GRACE)

        with self._breaking():
            self._here(lambda: inside("reduce_scatter", source, own, op))
            mine = self._here(lambda: gpus.download(own, size))
            self._complete(
                said.words, lambda epoch: self._across_of_gpus(mine, call.dtype, between, said, deadline, epoch)
            )
            if call.op == AVG and mine.size:
                combine(mine, [mine], call.dtype, AVG, self.size)
            self._here(lambda: gpus.upload(mine, own))
            self._here(lambda: inside("all_gather", own, target, SUM))

    def _here(self, action: Callable[[], T]) -> T:
        """Do something with the ranks of this host; if it fails, all ranks of the group are told."""
        results: list[T] = []

        def steps() -> Steps:
            results.append(action())
            yield from ()

        self.wait(self._named(steps()))
        return results[0]

    def _meeting(self, said: Said, deadline: Deadline, epoch: int) -> Steps:
        try:
            yield from self._meet(said, epoch, deadline)
        except MismatchError:
            self._done = epoch
            raise
        self._done = epoch

    def _across_of_gpus(self, mine: Bytes, dtype: int, op: int, said: Said, deadline: Deadline, epoch: int) -> Steps:
        self._begun = epoch
        wait = partial(self._wait, said, epoch, deadline, "in the middle of it this came to a stop:")
        yield from self._between("all_reduce", mine, mine, None, dtype, op, 0, wait)
        self._done = epoch

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
