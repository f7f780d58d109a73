"""Ranks on one machine: every collective is one call of the native core, on shared memory."""

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from math import prod
from typing import Any, Self

from ringcomm.bootstrap.descriptor_exchange import Exchanged, exchange_descriptors
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.processes import is_stopped
from ringcomm.bootstrap.start_errors import by_rank, rank_in_job
from ringcomm.bootstrap.store import Store
from ringcomm.config import Config
from ringcomm.errors import Aborted, ArgumentError, CollectiveTimeout, PeerLost, refuse
from ringcomm.machine import memory, topology
from ringcomm.machine.tuning import NEVER
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.calls import CollectiveCall
from ringcomm.transports.contract import LocalTransport
from ringcomm.transports.shared_arrays import SharedArrays
from ringcomm.version import VERSION

__all__ = ["NEEDS_STORE", "ShmTransport", "check_versions", "connect", "serves"]

log = logging.getLogger("ringcomm")

NEEDS_STORE = True

MOST_ADDRESSES = 1 << 45  # of all heaps: a quarter of what a process has
HUGE_PAGE = 2 << 20
TREE_WAIT_NS = 10_000  # in which ranks that call in a loop reach each other; to read all records takes less
SIMULATED_TREE_WAIT_NS = 1_000_000  # where they take turns on few cores
CMA_HUGE_BYTES = 2 << 20  # below, NumPy's arrays seldom lie in huge pages


class ShmTransport(LocalTransport):
    """One rank's end of a group that shares memory."""

    def __init__(self, handle: Any, rank: int, pids: Sequence[int], tuning: Any) -> None:
        """`pids`: the process id of each rank."""
        super().__init__("shm", handle, rank, len(pids), tuning)
        self._pids = pids

    def split(self, color: int | None, key: int) -> Self | None:
        requests = self.all_gather_facts("split", [color, key])
        members = [rank for rank in range(self.size) if requests[rank][0] == color]
        members.sort(key=lambda rank: requests[rank][1])  # stable: ties keep the order of the ranks
        leads = color is not None and members[0] == self.rank
        offsets = self.run_on_all("split", lambda: None if color is None else self._reserve_group(len(members), leads))
        groups: list[Self] = []

        def open_group() -> None:
            if color is None:
                return
            slot = ffi.new("rc_comm **")
            rank = members.index(self.rank)
            check(lib.rc_sub_open(self.handle, offsets[members[0]], rank, len(members), members, slot))
            groups.append(type(self)(slot[0], rank, self.processes(members), self.tuning))

        self.run_on_all("split", open_group)
        return groups[0] if groups else None

    def reserve_group(self, size: int) -> int:
        arenas = lib.rc_world_bytes(size, self.tuning)
        offset = self._reserve(arenas, f"the arenas of a group of {size} ranks", leads=True)
        assert offset is not None  # the one that leads reserves
        return offset

    def open_group(self, offset: int, members: Sequence[int], timeout: float) -> Self:
        tuning, slot = ffi.new("rc_tuning *", self.tuning[0]), ffi.new("rc_comm **")
        tuning.timeout = timeout
        rank, size = members.index(self.rank), len(members)
        check(lib.rc_group_open(self.handle, offset, rank, size, members, tuning, slot))
        return type(self)(slot[0], rank, self.processes(members), tuning)

    def shrink(self, timeout: float) -> tuple[Self, list[int]]:
        members, size, slot = ffi.new("int[]", self.size), ffi.new("int *"), ffi.new("rc_comm **")
        check(lib.rc_shrink(self.handle, timeout, members, size, slot))
        ranks = [*members[0 : size[0]]]
        left_out_ranks = sorted({*range(self.size)} - {*ranks, *self.lost()})
        shrunk = type(self)(slot[0], ranks.index(self.rank), self.processes(ranks), self.tuning)
        left_out_pids = self.processes(left_out_ranks)
        if shrunk.rank == 0:
            for rank, pid in zip(left_out_ranks, left_out_pids, strict=True):
                state = "is stopped" if is_stopped(pid) else "runs"
                text = "shrink left out rank %d: it did not call shrink in time, and its process %d %s"
                log.warning(text, rank, pid, state)
        try:
            shrunk.fused["barrier"](CollectiveCall(NULL, NULL, 0, 0), timeout)
            return shrunk, left_out_pids
        except (PeerLost, CollectiveTimeout, Aborted):  # more are lost meanwhile
            with closing(shrunk):
                again, also_left_out = shrunk.shrink(timeout)
            return again, [*left_out_pids, *also_left_out]
        except BaseException:  # the others need not wait for this rank
            shrunk.close()
            raise

    def allocate(self, description: str, size: int) -> Any:
        self._compare_requests(description)
        offset = self.run_on_all("empty", lambda: self._reserve_symmetric(size))[0]
        buffers: list[Any] = []

        def open_buffer() -> None:
            slot = ffi.new("rc_symmetric_buffer **")
            check(lib.rc_symmetric_buffer_open(self.handle, offset, size, slot))
            data = ffi.gc(lib.rc_symmetric_buffer_data(slot[0]), lambda _: lib.rc_symmetric_buffer_free(slot[0]))
            buffers.append(ffi.buffer(data, size))  # keeps `data` alive, and an array over it the buffer

        self.run_on_all("empty", open_buffer)
        return buffers[0]

    def shared_arrays(self) -> AbstractContextManager[None]:
        return SharedArrays(self.handle)

    def processes(self, ranks: Sequence[int]) -> list[int]:
        """Return the process ids of ranks."""
        return [self._pids[rank] for rank in ranks]

    def _reserve_group(self, size: int, leads: bool) -> int | None:
        return self._reserve(lib.rc_sub_bytes(size, self.tuning), f"the arenas of a group of {size} ranks", leads)

    def _reserve_symmetric(self, size: int) -> int | None:
        each = lib.rc_symmetric_buffer_bytes(size) if size < 1 << 62 else size  # beyond any memory, and perhaps 64 bits
        return self._reserve(
            self.size * each, f"a symmetric buffer of {size} bytes on each of {self.size} ranks", self.rank == 0
        )

    def _reserve(self, size: int, what: str, leads: bool) -> int | None:
        """Reserve memory once for all ranks that share it. Every rank checks it: cgroups and limits may differ."""
        memory.require(size, what)
        if not leads:
            return None
        offset = ffi.new("uint64_t *")
        check(lib.rc_reserve(self.handle, size, offset))
        return int(offset[0])


def serves(place: Place) -> bool:
    return not place.hosts


def connect(rank: int, size: int, store: Store, config: Config) -> ShmTransport:
    """Find the other ranks through `store` and map the shared memory."""
    hello = {"version": VERSION, "cores": sorted(topology.cores()), "addresses": memory.addresses()}
    if rank == 0:
        hello["topology"] = config.topology
        hello["tuning"] = {name: getattr(config, name, None) for name, _ in ffi.typeof("rc_tuning").fields}
    opened: list[ShmTransport] = []

    def open_world(joined: Exchanged) -> None:
        tuning, slot = ffi.new("rc_tuning *", joined.reply["tuning"]), ffi.new("rc_comm **")
        simulated = joined.reply["topology"]
        domain = topology.simulated_domain(simulated, rank) if simulated else topology.domain(topology.cores())
        nonce = joined.reply["nonce"]  # rank 0 maps first; that the others read it there proves that they share memory
        check(lib.rc_world_open(joined.fd, rank, size, joined.pids, joined.pidfds, nonce, [domain], tuning, slot))
        opened.append(ShmTransport(slot[0], rank, joined.pids, tuning))

    with exchange_descriptors(
        store, rank, size, hello, partial(_answer, store.members), open_world, config.start_limit
    ) as joined:
        log.debug("rank %d of %d shares memory, %s", rank, size, joined.reply["tuning"])
    return opened[0]


def _answer(members: Sequence[int], hellos: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """Decide for all ranks, on rank 0; return the settings and the descriptor of the memory."""
    check_versions([hello["version"] for hello in hellos], members=members)
    tuning = hellos[0]["tuning"]
    cores = [hello["cores"] for hello in hellos]
    tuning["cores"] = len(set().union(*cores))
    if tuning["oversubscribed"] is None:
        tuning["oversubscribed"] = topology.outnumbered(cores)
    simulated = hellos[0]["topology"]
    if simulated and prod(map(int, simulated.split("x"))) < len(hellos):
        raise refuse("topology (RINGCOMM_TOPOLOGY)", f"room for {len(hellos)} ranks", repr(simulated))
    tuning["tree_wait_ns"] = SIMULATED_TREE_WAIT_NS if simulated else 0 if tuning["oversubscribed"] else TREE_WAIT_NS
    tuning["copy_engine_bytes"] = tuning["copy_engine_bytes"] or 0  # None: never
    tuning["nontemporal_bytes"] = tuning["nontemporal_bytes"] or 0  # None: each rank measures
    cma_bytes = tuning["cma_bytes"]
    tuning["cma_huge_bytes"] = CMA_HUGE_BYTES if cma_bytes is None else cma_bytes
    tuning["cma_bytes"] = NEVER if cma_bytes is None else cma_bytes
    each = min([MOST_ADDRESSES // len(hellos), *(hello["addresses"] for hello in hellos)])
    tuning["heap_bytes"] = each - each % HUGE_PAGE
    tuning["wake_ns"] = 0  # only once there is memory, of which its thread needs some, too
    size = lib.rc_world_bytes(len(hellos), ffi.new("rc_tuning *", tuning))
    memory.require(size, f"the arenas of {len(hellos)} ranks")
    tuning["wake_ns"] = _wake_ns(cores)
    fd = ffi.new("int *")
    check(lib.rc_file_create(fd))
    return {"tuning": tuning, "nonce": int.from_bytes(os.urandom(8), "little"), "topology": simulated}, fd[0]


def _wake_ns(cores: list[list[int]]) -> int:
    """Measure what a sleeping rank takes to wake up, given the cores of each rank: how long to spin follows from it."""
    ns = ffi.new("uint64_t *")
    check(lib.rc_wake_latency(cores[0][0], cores[-1][-1], ns))
    log.debug("waking a rank: %.3g us", ns[0] * 1e-3)
    return int(ns[0])


def check_versions(versions: Sequence[str], member: str = "rank", members: Sequence[int] = ()) -> None:
    """Raise ArgumentError if the ranks, or the nodes, run different versions of ringcomm."""
    other = next((rank for rank, each in enumerate(versions) if each != versions[0]), None)
    if other is not None:
        text = f"the {member}s run different versions of ringcomm: {by_rank(versions, member, members)}"
        raise ArgumentError(text, rank=rank_in_job(members, other) if member == "rank" else None)
