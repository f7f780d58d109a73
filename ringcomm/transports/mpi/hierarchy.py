"""The hierarchical transport, for hosts with several ranks: shared memory inside a host, MPI between hosts."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ringcomm.algorithms import pairwise
from ringcomm.algorithms.schedule import NO_PEER, Lengths, even
from ringcomm.algorithms.select import MPI, AlgorithmSelector
from ringcomm.bootstrap.store import format_ranks
from ringcomm.devices.contract import Device
from ringcomm.errors import Aborted, MismatchError, RingcommError
from ringcomm.native import NULL, ffi, lib
from ringcomm.transports.blocks import NOTHING, Blockwise, Bytes, Signature, Steps
from ringcomm.transports.contract import CollectiveCall, LocalTransport, Transport
from ringcomm.transports.cuda.group import Unreachable
from ringcomm.transports.cuda.hosts import HostGpus
from ringcomm.transports.messages.group import Membership
from ringcomm.transports.mpi.rail import Rail, Wait, combine
from ringcomm.transports.mpi.stages import Counts, HierarchicalCollective
from ringcomm.transports.mpi.transport import ANSWER, AVG, PREMUL, STALLED, SUM, MpiTransport
from ringcomm.transports.network.layout import HostLayout, layout_of
from ringcomm.transports.waits import INFINITE, Deadline

__all__ = ["HierarchicalTransport", "assemble"]

log = logging.getLogger("ringcomm")

T = TypeVar("T")

# Seconds added to timeouts inside a host: its ranks may wait for another host, and report the cause more precisely.
GRACE = 1.0


class HierarchicalTransport(MpiTransport):
    """One rank's end of a group that spans hosts; `local` is the transport of this host's ranks.

    It checks signatures, fails and sends messages as MpiTransport does. Only the data of collectives takes other paths.
    """

    def __init__(
        self, membership: Membership, rail: Rail, selector: AlgorithmSelector, local: LocalTransport, hosts: HostLayout
    ) -> None:
        self._local, self._hosts = local, hosts
        self._rail_selector = selector.sharing(hosts.rails)
        self._gpus: HostGpus | None = None
        self._gpus_connected: bool | None = None  # None: not tried yet
        color = hosts.local_rank if hosts.local_rank < hosts.rails else None
        self._rail = rail.split(color, hosts.host, membership.timeout)
        super().__init__("shm+mpi", membership, rail, selector)

    def _split_resources(self, group: int | None, rank: int) -> Any:
        return super()._split_resources(group, rank), self._local.split(group, rank)

    def _make_child(self, resources: Any, membership: Membership) -> Transport:
        rail, local = resources
        ranks_here = [self._members.index(member) for member in membership.members]
        hosts = [self._hosts.locate(rank)[0] for rank in ranks_here]
        return assemble(membership, rail, self._selector, local, hosts)

    def allocate(self, description: str, size: int) -> Any:
        """Return zeros in memory that the ranks of this host share."""
        return self._gather_and_apply(description, NOTHING, lambda _: self._local.allocate(description, size))

    def close(self) -> bool:
        if self._queue:  # end its calls inside the host
            with suppress(RingcommError):
                self._local.fail(Aborted(f"rank {self.rank} closed the communicator", rank=self._local.rank))
        return super().close() and (not self._gpus or self._gpus.close()) and self._local.close()

    def _rails(self) -> list[Rail]:
        return [rail for rail in (self._all_ranks, self._rail) if rail]

    def _fail(self, error: RingcommError, notify_peers: bool = True) -> None:
        first = self._failure is None
        super()._fail(error, notify_peers)
        if first:
            with suppress(RingcommError):  # it may have failed already
                self._local.fail(Aborted(str(error), rank=self._local.rank))

    # --- The data -----------------------------------------------------------------------------------------------------

    def _move(self, call: Blockwise, source: Bytes, target: Bytes, op: int, wait: Wait, deadline: Deadline) -> Steps:
        if self._selector.name == MPI:
            return super()._move(call, source, target, op, wait, deadline)
        item, dtype = call.item, call.dtype

        def intra_host(collective: str, source: Bytes, target: Bytes, counts: Counts | None, root: int) -> Steps:
            lengths = NULL if counts is None else ffi.new("uint64_t[]", list(counts))
            block = source if collective in ("broadcast", "gather", "all_gather") else target
            count = 0 if collective == "all_to_all" else block.size // item
            given, got = (ffi.from_buffer(data) if data.size else NULL for data in (source, target))
            intra_call = CollectiveCall(given, got, count, dtype, op, 1.0, root, lengths)
            return self._intra_host(collective, intra_call, deadline)

        def inter_host(collective: str, source: Bytes, target: Bytes, counts: Counts | None, root: int) -> Steps:
            return self._inter_host(collective, source, target, counts, dtype, op, root, wait)

        def exchange(source: Bytes, target: Bytes) -> Steps:
            lengths = Lengths(tuple(call.rows), tuple(call.recv_rows))
            local = frozenset(self._hosts.local_ranks)
            return self._all_ranks.collective(pairwise.all_to_all, source, target, lengths, dtype, op, 0, wait, local)

        return HierarchicalCollective(self._hosts, call, source, target, intra_host, inter_host, exchange).run()

    def _inter_host(
        self,
        collective: str,
        source: Bytes,
        target: Bytes,
        counts: Counts | None,
        dtype: int,
        op: int,
        root: int,
        wait: Wait,
    ) -> Steps:
        """Run a collective on this rank's rail, if it has one."""
        rail = self._rail
        if rail is None:
            return

        def wait_on_rail(ready: Callable[[], bool], peers: Sequence[int]) -> Steps:
            """Wait for peers, numbered as on the rail: by host."""
            return wait(ready, [self._hosts.ranks[host][self._hosts.local_rank] for host in {*peers} - {NO_PEER}])

        item = lib.rc_dtype_bytes(dtype)
        lengths = Lengths(even(source.size // item, rail.size) if counts is None else tuple(counts))
        algorithm = self._rail_selector.of(collective, rail.size, lengths, item)
        self._path = f"{algorithm.name} between hosts", 1
        yield from rail.collective(algorithm, source, target, lengths, dtype, op, root, wait_on_rail)

    # --- Arrays on GPUs -----------------------------------------------------------------------------------------------

    def _connect_gpus(self, device: Device) -> bool:
        """Return whether the GPUs of every host reach each other. Collective, the first time."""
        if self._gpus_connected is None:
            gpus: list[HostGpus] = []

            def connect(_: object) -> None:
                with suppress(Unreachable):
                    gpus.append(HostGpus(self._local, device))

            description = "the first all_reduce on GPUs"
            self._gather_and_apply(description, NOTHING, connect)
            mine = np.full(1, len(gpus), np.uint8)
            connected = self._gather_and_apply(description, mine, lambda answers: [*map(bool, answers)])
            self._gpus_connected = all(connected) and self._selector.name != MPI
            self._gpus = gpus[0] if gpus else None
            if not self._gpus_connected:
                log.warning("arrays on GPUs of several hosts are staged through host memory")
        return self._gpus_connected

    def all_reduce_on_gpus(self, device: Device, call: CollectiveCall, timeout: float) -> bool:
        """Reduce on the GPUs of each host; only the data between hosts passes through host memory."""
        if not self._connect_gpus(device):
            return False
        deadline = Deadline(self.effective_timeout(timeout))
        blocks = Blockwise(self.rank, self.size, "all_reduce", call)
        signature = Signature(f"{blocks.signature.text} on GPUs", blocks.signature.counts)
        self._run(signature.text, lambda epoch: self._gpu_signature_check(signature, deadline, epoch))
        gpus, source, target, item = self._gpus, call.source, call.target, blocks.item
        assert gpus
        slices, local_rank = self._hosts.slices(call.count), self._hosts.local_rank
        size, own = slices[local_rank] * item, target + sum(slices[:local_rank]) * item
        op = SUM if call.op == AVG else call.op
        rail_op = SUM if op == PREMUL else op

        def intra_host(collective: str, source: int, target: int, op: int) -> None:
            gpus.run(collective, source, target, slices, (call.dtype, op, call.factor), deadline.left() + GRACE)

        with self._breaking_on_interrupt():
            self._run_locally(lambda: intra_host("reduce_scatter", source, own, op))
            mine = self._run_locally(lambda: gpus.download(own, size))
            self._run(
                signature.text,
                lambda epoch: self._gpu_inter_host(mine, call.dtype, rail_op, signature, deadline, epoch),
            )
            if call.op == AVG and mine.size:
                combine(mine, [mine], call.dtype, AVG, self.size)
            self._run_locally(lambda: gpus.upload(mine, own))
            self._run_locally(lambda: intra_host("all_gather", own, target, SUM))
        return True

    def _run_locally(self, action: Callable[[], T]) -> T:
        """Return `action()`, which involves the ranks of this host; if it fails, all ranks of the group raise that."""
        results: list[T] = []

        def steps() -> Steps:
            results.append(action())
            yield from ()

        self.wait(self._in_group_ranks(steps()))
        return results[0]

    def _gpu_signature_check(self, signature: Signature, deadline: Deadline, epoch: int) -> Steps:
        try:
            yield from self._check_signatures(signature, epoch, deadline)
        except MismatchError:
            self._done = epoch
            raise
        self._done = epoch

    def _gpu_inter_host(
        self, mine: Bytes, dtype: int, op: int, signature: Signature, deadline: Deadline, epoch: int
    ) -> Steps:
        self._begun = epoch
        wait = partial(self._wait, signature, epoch, deadline, STALLED)
        yield from self._inter_host("all_reduce", mine, mine, None, dtype, op, 0, wait)
        self._done = epoch

    # --- Inside the host ----------------------------------------------------------------------------------------------

    def _intra_host(self, collective: str, call: CollectiveCall, deadline: Deadline) -> Steps:
        """Run a collective of the ranks of this host."""
        return self._in_group_ranks(self._intra_host_steps(collective, call, deadline))

    def _intra_host_steps(self, collective: str, call: CollectiveCall, deadline: Deadline) -> Steps:
        limit = deadline.left() + GRACE
        if self._queue.may_block:
            self._local.fused[collective](call, limit)
            return
        pending = self._local.start(collective, call, limit)
        try:
            while not pending.done():
                yield
        except BaseException:  # a signal: wait until nothing uses the memory of the call
            self._local.fail(Aborted(f"rank {self.rank} was interrupted", rank=self._local.rank))
            with suppress(RingcommError):
                pending.wait(limit)
            raise
        pending.wait(limit)

    def _in_group_ranks(self, steps: Steps) -> Steps:
        """Run steps of the ranks of this host; convert the ranks in their errors to ranks of the group."""
        try:
            yield from steps
        except RingcommError as error:
            if isinstance(error, Aborted):  # by a rank that knows of a failure, which it sends to all ranks
                received = Deadline(ANSWER)
                yield from self.wait_until(received.passed, Deadline(INFINITE), "a collective of the host", list)
            local = self._hosts.local_ranks
            rank = None if error.rank is None else local[error.rank]
            text = f"among {format_ranks(local)}, which are 0 to {len(local) - 1} on their host: {error}"
            failure = type(error)(text, rank=rank)
            with self.changed:
                self._fail(failure)
            raise failure from None


def assemble(
    membership: Membership, rail: Rail, selector: AlgorithmSelector, local: LocalTransport, hosts: list[int]
) -> Transport:
    """Return the transport of a group, given the host of each rank: shared memory or MPI alone where one suffices."""
    layout = layout_of(rail.rank, hosts)
    if len(layout.ranks) == 1:
        rail.free()
        return local
    if max(map(len, layout.ranks)) == 1:
        local.close()
        return MpiTransport("mpi", membership, rail, selector)
    return HierarchicalTransport(membership, rail, selector, local, layout)
