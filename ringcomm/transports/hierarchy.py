"""Ranks on several hosts, some of them together on one: shared memory inside a host, MPI between hosts."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ringcomm.algorithms import pairwise
from ringcomm.algorithms.schedule import NOBODY, Lengths, even
from ringcomm.algorithms.select import MPI, Choice
from ringcomm.errors import Aborted, RingcommError
from ringcomm.native import NULL, ffi
from ringcomm.store import ranks
from ringcomm.transports.blocks import Blockwise, Bytes, Steps
from ringcomm.transports.contract import Transport
from ringcomm.transports.group import Membership
from ringcomm.transports.lane import Lane, Wait
from ringcomm.transports.mpi import ANSWER, MpiTransport
from ringcomm.transports.stages import Hosts, Rows, Stages
from ringcomm.transports.waits import INFINITE, Deadline

__all__ = ["HierarchicalTransport", "assemble"]

# Seconds that a rank waits longer for those of its host: they may wait for another host, and know better what is wrong.
GRACE = 1.0


class HierarchicalTransport(MpiTransport):
    """One rank's end of a group that spans hosts; `local` are the ranks of its own.

    Groups meet, fail and send messages as those of MPI. Only the data of collectives takes other ways.
    """

    def __init__(self, membership: Membership, lane: Lane, choice: Choice, local: Transport, hosts: Hosts) -> None:
        self._local, self._hosts = local, hosts
        self._choice_on_lanes = choice.sharing(hosts.lanes)
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
        return super().close() and self._local.close()

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

        def wait_on_lane(ready: Callable[[], bool], peers: Sequence[int]) -> Steps:
            """Wait for peers that are numbered as on the lane: by their hosts."""
            return wait(ready, [self._hosts.ranks[host][self._hosts.place] for host in {*peers} - {NOBODY}])

        def inside(collective: str, source: Bytes, target: Bytes, rows: Rows | None, root: int) -> Steps:
            counts = NULL if rows is None else ffi.new("uint64_t[]", list(rows))
            block = source if collective in ("broadcast", "gather", "all_gather") else target
            count = 0 if collective == "all_to_all" else block.size // item
            memory = (ffi.from_buffer(data) if data.size else NULL for data in (source, target))
            return self._inside(collective, (*memory, count, dtype, op, 1.0, root, counts), deadline)

        def across(collective: str, source: Bytes, target: Bytes, rows: Rows | None, root: int) -> Steps:
            if self._across is None:
                return
            lane = self._across
            lengths = Lengths(even(source.size // item, lane.size) if rows is None else tuple(rows))
            algorithm = self._choice_on_lanes.of(collective, lane.size, lengths, item)
            self._way = f"{algorithm.name} between hosts", 1
            yield from lane.collective(algorithm, source, target, lengths, dtype, op, root, wait_on_lane)

        def apart(source: Bytes, target: Bytes) -> Steps:
            lengths = Lengths(tuple(call.rows), tuple(call.come))
            near = frozenset(self._hosts.here)
            return self._lane.collective(pairwise.all_to_all, source, target, lengths, dtype, op, 0, wait, near)

        return Stages(self._hosts, call, source, target, inside, across, apart).run()

    def _inside(self, collective: str, facts: tuple[Any, ...], deadline: Deadline) -> Steps:
        """Do a collective of the ranks of this host."""
        limit = deadline.left() + GRACE
        call: Any = (*facts, limit)
        try:
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
        except RingcommError as error:
            if isinstance(error, Aborted):  # by a rank that knows of a failure: all ranks are told which
                told = Deadline(ANSWER)
                yield from self.until(told.passed, Deadline(INFINITE), collective, list)
            here = self._hosts.here
            rank = None if error.rank is None else here[error.rank]
            failure = type(error)(f"among {ranks(here)}, which are 0 to {len(here) - 1} there: {error}", rank=rank)
            with self.changed:
                self._fail(failure)
            raise failure from None


def assemble(membership: Membership, lane: Lane, choice: Choice, local: Transport, hosts: list[int]) -> Transport:
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
