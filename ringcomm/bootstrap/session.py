"""What the members of a session share, as its server keeps it: here the store of a start; member_store.py, shrink.py.

A session knows nothing of sockets. It takes the messages of its members and returns replies:

    get                     → value, once it is set; if not to wait, and it is not: absent
    leave                   this member leaves, as it does when its connection ends

    of a start, whose failure all are told once
    all_gather              a fact of this member → value, once those of all have come: the list that it reads
    missing                 → value, if they have; else the ranks whose facts have not
    abort                   the start fails, for all

A member waits for one value at a time.
"""

import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from ringcomm.bootstrap.start_errors import lost_in_start, rank_in_job
from ringcomm.bootstrap.wire.framing import Frame, encode, encode_failure, failure_of
from ringcomm.errors import CollectiveTimeout, RingcommError

__all__ = [
    "ALL",
    "CONNECTED",
    "FIRST",
    "MEMBERS",
    "NODES",
    "SHRINK",
    "BaseSession",
    "Contribution",
    "Peer",
    "Present",
    "Refused",
    "Replies",
    "Start",
    "lists_of",
]

# The names of sessions that last; those of starts are named by job and start.
NODES, MEMBERS, SHRINK = "nodes", "members", "shrink"

CONNECTED = "connected"  # what is gathered last in a start: all of its ranks have connected, or none has

# What a rank reads of the facts that all have given: all, that of rank 0, or, with any other text, those of the ranks
# that read with the same text. If every rank read all, the bytes would grow with the square of the number of ranks.
ALL, FIRST = "all", "first"

Peer = Hashable
Replies = list[tuple[Peer, bytes]]


class Contribution(NamedTuple):
    """What a rank gives to one all_gather of a start, whose `name` no other has, and what it `reads` there."""

    name: str
    rank: int
    size: int  # how many ranks give
    fact: bytes  # in JSON
    reads: str = ALL


class Refused(Exception):
    """A process is no member, for this reason."""


class Present(NamedTuple):
    """A member: its rank, -1 for a launcher among ranks, and what its process is called."""

    rank: int
    process: str


class BaseSession:
    """Members, keys with values, and the members that wait for one. Methods return what the server sends, and to whom.

    Attributes:
        present: the members
    """

    def __init__(self) -> None:
        self.present: dict[Peer, Present] = {}
        self._values: dict[str, bytes] = {}
        self._waiting: defaultdict[str, dict[Peer, int]] = defaultdict(dict)  # by key: the number of the question
        self._waits_for: dict[Peer, str] = {}

    def join(self, peer: Peer, hello: Frame) -> Replies:
        """Admit a member; raise Refused. One that is told a failure instead is no member."""
        self.present[peer] = Present(int(hello.fields["rank"]), str(hello.fields["process"]))
        return [(peer, encode("joined"))]

    def take(self, peer: Peer, message: Frame) -> Replies:
        """Do what a member asks for; raise ValueError, KeyError or TypeError if it cannot be understood."""
        if message.kind == "leave":
            return self.leave(peer)
        if message.kind != "get":
            raise ValueError(message.kind)
        return self._get(peer, str(message.fields["key"]), message.fields["id"], message.fields["wait"])

    def _get(self, peer: Peer, key: str, number: int, waits: bool) -> Replies:
        self._answer(peer)
        if key in self._values:
            return [(peer, encode("value", self._values[key], id=number))]
        if not waits:
            return [(peer, encode("absent", id=number))]
        self._waiting[key][peer], self._waits_for[peer] = number, key
        return []

    def set(self, key: str, value: bytes) -> Replies:
        self._values[key] = value
        waiting = [*self._waiting.get(key, ())]
        return [(peer, encode("value", value, id=self._answer(peer))) for peer in waiting]

    def leave(self, peer: Peer) -> Replies:
        """Note that a member needs the session no more."""
        self._answer(peer)
        self.present.pop(peer, None)
        return []

    def lose(self, peer: Peer, how: str) -> Replies:  # noqa: ARG002 (as of other sessions)
        """Note that the connection of a member has ended."""
        return self.leave(peer)

    def _answer(self, peer: Peer) -> int | None:
        """Return the number of the question of a member that waits, and forget it."""
        if (key := self._waits_for.pop(peer, None)) is None:
            return None
        number = self._waiting[key].pop(peer)
        if not self._waiting[key]:
            del self._waiting[key]
        return number


def lists_of(facts: Mapping[int, bytes], reads: Mapping[int, str]) -> dict[str, bytes]:
    """Return the lists that are read of the facts of all ranks, in JSON, given what each rank reads."""
    ranks = defaultdict(list, {ALL: [*range(len(facts))], FIRST: [0]})
    for rank in ranks[ALL]:
        if reads[rank] not in (ALL, FIRST):
            ranks[reads[rank]].append(rank)
    return {read: b"[" + b",".join(facts[rank] for rank in ranks[read]) + b"]" for read in {*reads.values()}}


class _AllGather(NamedTuple):
    """What has come of the facts of all: by rank, the fact, what the rank reads, and from whom it has come."""

    size: int
    facts: dict[int, bytes]
    reads: dict[int, str]
    given_by: dict[int, Peer]


class Start(BaseSession):
    """The store of `size` members of one start: ranks, or the launchers of several hosts. The first failure ends it.

    `in_job`: the rank in the job of each rank: see start_errors.py.
    """

    noun = "rank"

    def __init__(self, size: int, in_job: Sequence[int] = ()) -> None:
        super().__init__()
        self.size, self._in_job = size, in_job
        self.failure: RingcommError | None = None
        self.failed_at = 0.0
        self._told = False  # all have been told the failure
        self.came: dict[int, str] = {}  # the process of every member that has ever joined
        self._gathers: dict[str, _AllGather] = {}  # by name, until all facts have come
        self._gathered: set[str] = set()

    @property
    def complete(self) -> bool:
        return len(self.came) == self.size

    @property
    def over(self) -> bool:
        """Whether nobody needs it any more, but for those who may come late to a failure."""
        return not self.present and (self.complete or self.failure is not None)

    def has(self, name: str) -> bool:
        """Return whether the facts of all have come."""
        return name in self._gathered

    def absent(self) -> list[int]:
        """Return the missing ranks, as in the job; none if nothing says which ranks they are."""
        if self.complete:
            return []
        return [number for rank, number in enumerate(self._in_job) if rank not in self.came]

    def join(self, peer: Peer, hello: Frame) -> Replies:
        rank, size, process = int(hello.fields["rank"]), int(hello.fields["size"]), str(hello.fields["process"])
        if size != self.size or not 0 <= rank < size:
            raise Refused(f"expected a {self.noun} of {self.size}, got {self.noun} {rank} of {size}")
        if rank in self.came and not self.failure:
            raise Refused(f"{self.noun} {rank} is already taken by {self.came[rank]}")
        if self.failure:
            self.came.setdefault(rank, process)
            return [(peer, encode_failure(self._failure_for_late(self.failure, rank)))]
        self.came[rank] = process
        return super().join(peer, hello)

    def take(self, peer: Peer, message: Frame) -> Replies:
        if message.kind == "abort":
            self.fail(failure_of(message))
            return []
        if message.kind in ("all_gather", "missing"):
            return self._take_part(peer, message)
        if message.kind == "get" and self.failure:
            return [(peer, encode_failure(self.failure, id=message.fields["id"]))]
        return super().take(peer, message)

    def _take_part(self, peer: Peer, message: Frame) -> Replies:
        """Answer a member with the facts that it reads, also after a failure if it asks again: see await_connected."""
        name, size, number = str(message.fields["key"]), int(message.fields["size"]), message.fields["id"]
        reads = str(message.fields["reads"])
        if size > self.size:
            raise ValueError(size)
        replies: Replies = []
        if self.failure and not self.has(name):
            return [(peer, encode_failure(self.failure, id=number))]
        if message.kind == "all_gather":
            rank = int(message.fields["rank"])
            replies = self.all_gather(peer, Contribution(name, rank, size, message.payload, reads))
        elif not self.has(name):
            self._answer(peer)
            given = self._gathers[name].facts if name in self._gathers else {}
            return [(peer, encode("missing", id=number, ranks=sorted({*range(size)} - given.keys())))]
        return [*replies, *self._get(peer, _list_key(name, reads), number, waits=True)]

    def all_gather(self, peer: Peer, given: Contribution) -> Replies:
        """Note a fact; once all have come, the lists that are read are values."""
        name, rank, size, fact, reads = given
        if self.has(name):
            return []
        gather = self._gathers.get(name) or _AllGather(size, {}, {}, {})
        if size != gather.size or not 0 <= rank < size or gather.given_by.get(rank, peer) != peer:
            raise ValueError(name)
        self._gathers[name] = gather
        gather.given_by[rank], gather.facts[rank], gather.reads[rank] = peer, fact, reads
        if len(gather.facts) < size:
            return []
        del self._gathers[name]
        self._gathered.add(name)
        lists = lists_of(gather.facts, gather.reads).items()
        return [reply for read, facts in lists for reply in self.set(_list_key(name, read), facts)]

    def _failure_for_late(self, error: RingcommError, rank: int) -> RingcommError:
        if isinstance(error, CollectiveTimeout) and rank_in_job(self._in_job, rank) in (error.got or ()):
            return CollectiveTimeout(f"this {self.noun} came too late: {error}", rank=error.rank, got=error.got)
        return error

    def fail(self, error: RingcommError) -> None:
        if not self.failure:
            self.failure, self.failed_at = error, time.monotonic()

    def lose(self, peer: Peer, how: str) -> Replies:
        if lost := self.present.get(peer):
            self.fail(lost_in_start(rank_in_job(self._in_job, lost.rank), lost.process))
        return super().lose(peer, how)

    def poll(self) -> Replies:
        """Answer all that wait with the failure, and tell the others once: so that none has to ask."""
        if not self.failure:
            return []
        waiting = [*self._waits_for]
        others = [] if self._told else [peer for peer in self.present if peer not in self._waits_for]
        self._told = True
        replies: Replies = [(peer, encode_failure(self.failure, id=self._answer(peer))) for peer in waiting]
        return [*replies, *((peer, encode_failure(self.failure)) for peer in others)]


def _list_key(name: str, read: str) -> str:
    """Return the key of the list of those facts that is read so; "get" finds that of all by its name."""
    return name if read == ALL else f"{name}\n{read}"
