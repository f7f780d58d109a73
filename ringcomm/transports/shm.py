"""Ranks on one machine: every collective is one call of the native core, over shared memory."""

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any, Self

from ringcomm import memory, topology
from ringcomm.buffer import CODES
from ringcomm.completion import when_done
from ringcomm.config import Config
from ringcomm.errors import Aborted, ArgumentError, MismatchError, RingcommError, in_words, raise_told, refuse
from ringcomm.native import NULL, STATUS, NativeQuick, check, ffi, lib
from ringcomm.store import Store, shared_failure
from ringcomm.transports import descriptors
from ringcomm.transports.contract import Fused
from ringcomm.types import COLLECTIVES, DTYPES, OPS

__all__ = ["ShmTransport", "connect"]

log = logging.getLogger("ringcomm")

FACT_BYTES = 2048  # what a rank tells the others before a split or an empty: small, and of one size for all
CALL_BYTES = 256  # what a report says of a call, at most
RECORDED = 1023  # calls of a rank in the flight record that are not being overwritten
PROBE_BYTES = 64 << 10  # of the order of a segment
STREAM_BYTES = 1 << 10  # non-temporal stores pay from here on, where they pay at all: below, the fence costs too much
WAYS = ("alone", "exchange", "one shot", "two stages", "symmetric", "threads", "reached")  # as enum rc_way
NEVER = 2**64 - 1
REACH_HUGE_BYTES = 2 << 20  # below, NumPy's arrays seldom lie in huge pages
TUNING = (
    "arena_bytes",
    "sub_arena_bytes",
    "segment_bytes",
    "small_bytes",
    "stream_bytes",
    "direct_bytes",
    "reach_bytes",
    "timeout",
)


class ShmTransport:
    """One rank's end of a group that shares memory."""

    name = "shm"

    def __init__(self, handle: Any, rank: int, size: int, tuning: Any) -> None:
        self._handle = ffi.gc(handle, lib.rc_free)
        self._tuning = tuning
        self.rank = rank
        self.size = size
        self.timeout: float = tuning.timeout
        ops = {op: code for op, (code, _) in OPS.items()}
        self.quick = NativeQuick(int(ffi.cast("uintptr_t", handle)), self._handle, check, CODES, ops, rank, size)
        self.fused: Mapping[str, Fused] = {name: _fused(self._handle, code) for name, code in COLLECTIVES.items()}

    def start(self, collective: str, *call: Any) -> "NativeWork":
        return self._start(lib.rc_collective, COLLECTIVES[collective], *call)

    def send(self, data: Any, count: int, dtype: int, peer: int, tag: int, timeout: float) -> None:
        check(lib.rc_send(self._handle, data, count, dtype, peer, tag, timeout, NULL))

    def recv(self, data: Any, count: int, dtype: int, peer: int, tag: int, timeout: float) -> int:
        source = ffi.new("int *")
        check(lib.rc_recv(self._handle, data, count, dtype, peer, tag, timeout, source, NULL))
        return int(source[0])

    def sendrecv(self, *call: Any) -> int:
        source = ffi.new("int *")
        check(lib.rc_sendrecv(self._handle, *call, source))
        return int(source[0])

    def isend(self, *call: Any) -> "NativeWork":
        return self._start(lib.rc_send, *call)

    def irecv(self, *call: Any) -> "NativeWork":
        return self._start(lib.rc_recv, *call, NULL)

    def split(self, color: int | None, key: int) -> Self | None:
        asked = self.exchange("split", [color, key])
        members = [rank for rank in range(self.size) if asked[rank][0] == color]
        members.sort(key=lambda rank: asked[rank][1])  # stable: ties keep the order of the ranks
        leads = color is not None and members[0] == self.rank
        offsets = self.together("split", lambda: None if color is None else self._reserve_group(len(members), leads))
        groups: list[Self] = []

        def open_group() -> None:
            if color is None:
                return
            slot = ffi.new("rc_comm **")
            rank = members.index(self.rank)
            check(lib.rc_sub_open(self._handle, offsets[members[0]], rank, len(members), members, slot))
            groups.append(type(self)(slot[0], rank, len(members), self._tuning))

        self.together("split", open_group)
        return groups[0] if groups else None

    def allocate(self, words: str, size: int) -> Any:
        asked = self.exchange("empty", words)
        for rank, theirs in enumerate(asked):
            if theirs != asked[0]:
                message = f"the ranks asked for different buffers: {_by_rank(asked)}"
                raise MismatchError(message, rank=rank, collective="empty", expected=asked[0], got=theirs)
        offset = self.together("empty", lambda: self._reserve_region(size))[0]
        buffers: list[Any] = []

        def open_region() -> None:
            slot = ffi.new("rc_region **")
            check(lib.rc_region_open(self._handle, offset, size, slot))
            data = ffi.gc(lib.rc_region_data(slot[0]), lambda _: lib.rc_region_free(slot[0]))
            buffers.append(ffi.buffer(data, size))  # keeps `data` alive, and an array over it the buffer

        self.together("empty", open_region)
        return buffers[0]

    def abort(self, reason: str) -> None:
        self.fail(Aborted(reason, rank=self.rank))

    def close(self) -> bool:
        status = lib.rc_close(self._handle)
        if status != lib.RC_INTERRUPTED:
            check(status)
        return bool(status == lib.RC_OK)

    def check(self) -> None:
        check(lib.rc_check(self._handle))

    def fail(self, error: RingcommError) -> None:
        """Break the group: every call on any rank, waiting or later, raises this."""
        rank = self.rank if error.rank is None else error.rank
        check(lib.rc_abort(self._handle, STATUS[type(error)], rank, str(error).encode(errors="backslashreplace")))

    def gone(self) -> list[int]:
        """Return the ranks that have died or closed."""
        gone = ffi.new("int *")
        ranks = []
        for rank in range(self.size):
            check(lib.rc_gone(self._handle, rank, gone))
            if gone[0] and rank != self.rank:
                ranks.append(rank)
        return ranks

    def way(self) -> tuple[str, int]:
        way, chunks = ffi.new("int *"), ffi.new("uint64_t *")
        check(lib.rc_last_way(self._handle, way, chunks))
        return WAYS[way[0]], int(chunks[0])

    def report(self, calls: int) -> str:
        calls = min(calls, RECORDED)
        most = calls + max(calls, 4) + 1  # done, still running, and the state of the rank
        text = ffi.new("char[]", CALL_BYTES * most * self.size)
        check(lib.rc_report(self._handle, calls, text, len(text)))
        return str(ffi.string(text), errors="replace")

    def _start(self, function: Callable[..., int], *call: Any) -> "NativeWork":
        slot = ffi.new("rc_work **")
        check(function(self._handle, *call, slot))
        return NativeWork(slot[0])

    def exchange(self, name: str, fact: Any, timeout: float = -1.0) -> list[Any]:
        """Return what every rank says, under the name of the call that needs it."""
        mine = json.dumps(fact).encode().ljust(FACT_BYTES)
        if len(mine) > FACT_BYTES:
            raise refuse(f"what {name} tells the other ranks", f"at most {FACT_BYTES} bytes", len(mine))
        facts = bytearray(FACT_BYTES * self.size)
        source, target = ffi.from_buffer(mine), ffi.from_buffer(facts)
        self.fused[name](source, target, FACT_BYTES, DTYPES["uint8"], *OPS["sum"], 0, NULL, timeout)
        return [json.loads(facts[at : at + FACT_BYTES]) for at in range(0, len(facts), FACT_BYTES)]

    def together(self, name: str, action: Callable[[], Any]) -> list[Any]:
        """Return what `action`, which takes memory, gives on every rank. If it raises on one, every rank raises."""
        error: Exception | None = None
        value = None
        try:
            value = action()
        except Exception as raised:  # whatever it is: the others wait
            error = raised
        outcomes = self.exchange(name, [value, in_words(error).encode("ascii", "replace").decode()[:300]])
        raise_told((words for _, words in outcomes), self.rank, error, name)
        return [value for value, _ in outcomes]

    def _reserve_group(self, size: int, leads: bool) -> int | None:
        return self._reserve(lib.rc_sub_bytes(size, self._tuning), f"the arenas of a group of {size} ranks", leads)

    def _reserve_region(self, size: int) -> int | None:
        each = lib.rc_region_bytes(size) if size < 1 << 62 else size  # what nobody has need not fit into 64 bits
        return self._reserve(
            self.size * each, f"a symmetric buffer of {size} bytes on each of {self.size} ranks", self.rank == 0
        )

    def _reserve(self, size: int, what: str, leads: bool) -> int | None:
        """Reserve memory once for all ranks that will share it. Each may have limits, or a cgroup, of its own."""
        memory.require(size, what)
        if not leads:
            return None
        offset = ffi.new("uint64_t *")
        check(lib.rc_reserve(self._handle, size, offset))
        return int(offset[0])


class NativeWork:
    """A call that the native core has queued."""

    def __init__(self, handle: Any) -> None:
        self._handle = ffi.gc(handle, lib.rc_work_free)

    def wait(self, timeout: float) -> int:
        source = ffi.new("int *", -1)
        check(lib.rc_work_wait(self._handle, timeout, source))
        return int(source[0])

    def done(self) -> bool:
        return bool(lib.rc_work_done(self._handle))

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        when_done(self._handle, callback)


def _fused(handle: Any, code: int) -> Fused:
    call = partial(lib.rc_collective, handle, code)

    def collective(*arguments: Any) -> None:
        status = call(*arguments, NULL)
        if status:
            check(status)

    return collective


def connect(rank: int, size: int, store: Store, config: Config) -> ShmTransport:
    """Meet the other ranks through `store`, and map the memory that all share."""
    hello = {
        "version": version("ringcomm"),
        "cores": sorted(topology.cores()),
        "tuning": {name: getattr(config, name) for name in (*TUNING, "oversubscribed")},
    }
    with shared_failure(store, rank), descriptors.meet(store, rank, size, hello, _answer, config.timeout) as meeting:
        tuning = ffi.new("rc_tuning *", meeting.welcome["tuning"])
        slot = ffi.new("rc_comm **")
        # Rank 0 comes first: the others read its nonce through the mapping, as the proof that the memory is shared.
        if rank > 0:
            store.get("mapped by 0", config.timeout)
        nonce = meeting.welcome["nonce"]
        check(lib.rc_world_open(meeting.fd, rank, size, meeting.pids, meeting.pidfds, nonce, tuning, slot))
        transport = ShmTransport(slot[0], rank, size, tuning)
        # Nobody is connected before all are: who fails here is named at once, and not by a timeout of the first call.
        store.set(f"mapped by {rank}", b"")
        if rank == 0:
            for other in range(1, size):
                store.get(f"mapped by {other}", config.timeout)
            store.set("connected", b"")
        store.get("connected", config.timeout)
    log.debug("rank %d of %d shares memory, %s", rank, size, meeting.welcome["tuning"])
    return transport


def _answer(hellos: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """Decide for all ranks, on rank 0; return that with the descriptor of the memory."""
    versions = [hello["version"] for hello in hellos]
    if len(set(versions)) > 1:
        raise ArgumentError(f"the ranks run different versions of ringcomm: {_by_rank(versions)}")
    tuning = hellos[0]["tuning"]
    if tuning["oversubscribed"] is None:
        cores = len(set().union(*(hello["cores"] for hello in hellos)))
        tuning["oversubscribed"] = len(hellos) > min(cores, topology.quota() or cores)
    if tuning["stream_bytes"] is None:
        tuning["stream_bytes"] = _stream_bytes([hello["cores"] for hello in hellos])
    reach = tuning["reach_bytes"]
    tuning["reach_huge_bytes"] = REACH_HUGE_BYTES if reach is None else reach
    tuning["reach_bytes"] = NEVER if reach is None else reach
    size = lib.rc_world_bytes(len(hellos), ffi.new("rc_tuning *", tuning))
    memory.require(size, f"the arenas of {len(hellos)} ranks")
    fd = ffi.new("int *")
    check(lib.rc_file_create(fd))
    return {"tuning": tuning, "nonce": secrets.randbits(64)}, fd[0]


def _stream_bytes(cores: list[list[int]]) -> int:
    """Measure which stores hand a block over faster from rank 0 to another rank, given the cores of each; return from
    which size on it should be the non-temporal ones.
    """
    writer = cores[0][0]
    reader = next((core for others in cores[1:] for core in others if core != writer), None)
    if reader is None:  # nothing leaves the cache of the one core there is
        return NEVER
    ordinary, streamed = ffi.new("double *"), ffi.new("double *")
    check(lib.rc_probe_handover(PROBE_BYTES, writer, reader, ordinary, streamed))
    faster = streamed[0] > 1.2 * ordinary[0]
    log.debug("handing over a block: %.3g GB/s, non-temporal %.3g GB/s", ordinary[0] * 1e-9, streamed[0] * 1e-9)
    return STREAM_BYTES if faster else NEVER


def _by_rank(words: list[str]) -> str:
    """Say who says what, ranks with the same words together."""
    ranks = {word: [rank for rank, other in enumerate(words) if other == word] for word in words}
    return "; ".join(f"{word} on rank {', '.join(map(str, where))}" for word, where in ranks.items())
