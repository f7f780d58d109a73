"""The transport between hosts: shared memory inside a host, a network of sockets or MPI between hosts, all native."""

import logging
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from ringcomm.algorithms.schedule import Block, Copy, Exchange
from ringcomm.algorithms.select import AlgorithmSelector
from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.errors import Aborted, ArgumentError, RingcommError
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.calls import CollectiveCall
from ringcomm.transports.contract import Transport
from ringcomm.transports.network.gpus import HostsGpus
from ringcomm.transports.network.host_layout import HostLayout, layout_of
from ringcomm.transports.network.programs import program_of
from ringcomm.transports.network.steps import HostCollective, Program, Step
from ringcomm.transports.network.survivors import Survivors
from ringcomm.transports.shm import ShmTransport
from ringcomm.transports.staged.staging import Staging
from ringcomm.types import COLLECTIVES

__all__ = ["Network", "NetworkTransport", "new_group_id"]

log = logging.getLogger("ringcomm")

NO_BLOCK = (0, 0, 0)


def new_group_id() -> int:
    """Return an id for the group of all processes, from which those of later groups count.

    No other job should have it: traces and flight records of several jobs may lie in one folder. UCX's tags have room
    for ids below 2^43.
    """
    return 1 + secrets.randbits(42)


class Network:
    """The link of this process to the others of a job, and its groups; `survivors` connects them after a loss."""

    def __init__(self, handle: Any, selector: AlgorithmSelector, name: str, survivors: Survivors | None = None) -> None:
        self.handle, self.selector, self.name, self.survivors = handle, selector, name, survivors
        self._last_id = 0  # the greatest of a group
        self._splits = 0  # in progress
        self._reserved: set[int] = set()  # since the first split in progress began
        self._open_groups = 0
        self._counting = threading.Lock()

    @contextmanager
    def splitting(self) -> Iterator[None]:
        with self._counting:
            self._splits += 1
        try:
            yield
        finally:
            with self._counting:
                self._splits -= 1
                if not self._splits:
                    self._reserved.clear()

    def propose_id(self) -> int:
        """Return the id of a new group, as far as this process knows."""
        with self._counting:
            return self._last_id + 1

    def reserve_ids(self, ids: Sequence[int]) -> bool:
        """Reserve ids for new groups; return False if another thread has reserved one of them meanwhile."""
        with self._counting:
            if not self._reserved.isdisjoint(ids):
                return False
            self._reserved.update(ids)
            self._last_id = max([self._last_id, *ids])
            return True

    def count_groups(self, change: int) -> None:
        """Count the groups that are opened and closed."""
        with self._counting:
            self._open_groups += change
            if self._open_groups:
                return
        self.leave()

    def use_flows(self, per_address: int) -> bool:  # noqa: ARG002 (of links that have some)
        """Use so many connections at each address for large data of two ranks; False: this link has no such."""
        return False

    def leave(self) -> None:
        """End this process's part in the network, after its groups are closed."""


class NetworkTransport(Transport):
    """One rank's end of a group whose ranks run on several hosts; `local` are those of this host."""

    def __init__(
        self, network: Network, group_id: int, members: list[int], layout: HostLayout, local: ShmTransport, parent: Any
    ) -> None:
        self._network, self._group_id, self._members = network, group_id, members
        self._layout, self._local, self._of_all = layout, local, parent == NULL
        size = len(members)
        rank = layout.local_ranks[layout.local_rank]
        hosts = [layout.locate(each)[0] for each in range(size)]
        slot = ffi.new("rc_comm **")
        shares = max(map(len, layout.ranks)) > 1
        here = local.handle
        check(
            lib.rc_network_group(network.handle, group_id, rank, size, members, hosts, here, parent, local.tuning, slot)
        )
        self._algorithms: list[str] = []  # by number of a program
        network.count_groups(1)
        self._closed = False
        self._gpus: HostsGpus | None = None
        super().__init__(f"shm+{network.name}" if shares else network.name, slot[0], rank, size, local.tuning)
        self._recorder = ffi.new_handle(self._record)
        check(lib.rc_set_recorder(self.handle, lib.ringcomm_record, self._recorder))

    def split(self, color: int | None, key: int) -> Transport | None:
        joined: list[Transport | None] = []
        with self._network.splitting():
            requests = self.all_gather_facts("split", [color, key])
            ids = self._agree_on_ids(dict.fromkeys(each for each, _ in requests if each is not None))
            # No rank uses a group before all have it.
            self.run_on_all("split", lambda: joined.append(self._join(color, key, requests, ids)))
        return joined[0]

    def _agree_on_ids(self, colors: Iterable[int]) -> dict[int, int]:
        """Return an id for the group of each color, which no other group of any of these processes has."""
        while True:
            first = max(self.all_gather_facts("split", self._network.propose_id()))
            ids = {color: first + i for i, color in enumerate(colors)}
            if all(self.all_gather_facts("split", self._network.reserve_ids([*ids.values()]))):
                return ids

    def _join(self, color: int | None, key: int, requests: list[Any], ids: dict[int, int]) -> Transport | None:
        local = self._local.split(color, key)
        if color is None or local is None:
            return None
        members = [rank for rank in range(self.size) if requests[rank][0] == color]
        members.sort(key=lambda rank: requests[rank][1])  # stable: ties keep the order of the ranks
        hosts = [self._layout.locate(rank)[0] for rank in members]
        layout = layout_of(members.index(self.rank), hosts)
        if len(layout.ranks) == 1:
            return local
        processes = [self._members[rank] for rank in members]
        return type(self)(self._network, ids[color], processes, layout, local, self.handle)

    def shrink(self, timeout: float) -> tuple[Transport, Sequence[int]]:
        survivors = self._network.survivors
        if survivors is None:
            raise ArgumentError(
                "shrink: on several hosts the launcher decides who is left; "
                "start the ranks with ringcomm run --nnodes … --respawn N"
            )
        with suppress(RingcommError):  # the first failure stays
            self.fail(Aborted(f"rank {self.rank} has called shrink", rank=self.rank))
        timeout = self.timeout if timeout < 0 else timeout
        name = f"{self._group_id} of {min(self._members)}"  # groups without a common process may have one id
        elastic = survivors.place.max_restarts is not None  # the launchers end those that are left out
        members = survivors.place.members if self._of_all and elastic else ()
        shrunk, left_out_ranks = survivors.regroup(name, self.rank, self.size, members, self.lost, timeout)
        if left_out_ranks and shrunk.rank == 0:
            log.warning("shrink left out %s, which did not call shrink in time", format_ranks(left_out_ranks))
        return shrunk, ()  # the launchers know which processes they end

    def allocate(self, description: str, size: int) -> Any:
        """Return zeros in memory that the ranks of this host share."""
        self._compare_requests(description)
        memory: list[Any] = []
        self.run_on_all("empty", lambda: memory.append(self._local.allocate(description, size)))
        return memory[0]

    def shared_arrays(self) -> AbstractContextManager[None]:
        return self._local.shared_arrays()  # for the steps inside this host

    def collective_on_gpus(self, staging: Staging, name: str, call: CollectiveCall, timeout: float) -> bool:
        if self._gpus is None:
            self._gpus = HostsGpus(self, self.split, self._local, self._layout, self._network.selector, staging)
        return self._gpus.run(staging.device, name, call, self.timeout if timeout < 0 else timeout)

    def close(self) -> bool:
        try:
            closed = super().close()
        except RingcommError:  # it is closed all the same
            self._left()
            raise
        return closed and self._left()

    def _left(self) -> bool:
        if self._gpus and not self._gpus.close():
            return False
        if not self._closed:
            self._closed = True
            self._network.count_groups(-1)
        return self._local.close()

    def path(self) -> tuple[str, int]:
        path, number = ffi.new("int *"), ffi.new("uint64_t *")
        check(lib.rc_last_path(self.handle, path, number))
        return (self._algorithms[number[0]], 1) if path[0] == lib.RC_PATH_PROGRAM else super().path()

    def use_flows(self, per_address: int) -> bool:
        """See Network."""
        return self._network.use_flows(per_address)

    # --- Programs -----------------------------------------------------------------------------------------------------

    def _record(self, collective: int, arguments: Any) -> None:
        """Record the program of a call, which needs it for the first time: the core asks for it."""
        call = CollectiveCall(*(getattr(arguments, name) for name in CollectiveCall._fields))
        row = [*COLLECTIVES.values()][collective]
        blocks = Blockwise(self.rank, self.size, row.moves_as, call)
        program = program_of(self._layout, blocks, call.source == call.target, self._network.selector)
        if program.algorithm not in self._algorithms:
            self._algorithms.append(program.algorithm)
        steps, keep = _native_steps(program)
        number, count = self._algorithms.index(program.algorithm), len(program.steps)
        check(lib.rc_add_program(self.handle, collective, arguments, number, program.scratch, steps, count))
        del keep


def _native_steps(program: Program) -> tuple[Any, list[Any]]:
    """Return the steps as an array of rc_step, and the memory to which it points."""
    keep: list[Any] = []
    steps = ffi.new("rc_step[]", len(program.steps))
    for native, step in zip(steps, program.steps, strict=True):
        _fill(native, step, keep)
    return steps, keep


def _fill(native: Any, step: Step, keep: list[Any]) -> None:
    native.dest = native.source = -1
    if isinstance(step, Copy):
        native.kind, native.outgoing, native.incoming = lib.RC_STEP_COPY, _block(step.source), _block(step.target)
    elif isinstance(step, Exchange):
        native.kind, native.dest, native.source = lib.RC_STEP_EXCHANGE, step.dest, step.source
        native.outgoing, native.incoming = _block(step.outgoing), _block(step.incoming)
        native.operand = _block(step.operand) if step.operand else NO_BLOCK
    else:
        assert isinstance(step, HostCollective), "a RailCollective is not of programs in host memory"
        native.kind, native.collective, native.root = lib.RC_STEP_LOCAL, COLLECTIVES[step.collective].code, step.root
        native.outgoing, native.incoming, native.count = _block(step.source), _block(step.target), step.count
        native.overlaps = step.overlaps
        if step.counts:
            native.counts = counts = ffi.new("uint64_t[]", list(step.counts))
            keep.append(counts)


def _block(block: Block) -> tuple[int, int, int]:
    return block.memory, block.begin, block.length
