"""What the members of a session share, as its server keeps it: the store of a start, and one that lasts like the job.

A session knows nothing of sockets. It takes the messages of its members and returns replies:

    set, propose, delete    a value; get → value, absent, or failure
    keys                    → the keys that begin so
    abort                   the start fails, for all
    leave                   this member leaves, as it does when its connection ends
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ringcomm.bootstrap.key_values import KeyValues, Peer, Replies
from ringcomm.bootstrap.start_errors import lost_in_start, rank_in_job
from ringcomm.bootstrap.wire.framing import Frame, encode, encode_failure, failure_of
from ringcomm.errors import ArgumentError, PeerLost, RingcommError

__all__ = [
    "MEMBERS",
    "NODES",
    "SHRINK",
    "MemberStore",
    "Refused",
    "ServedSession",
    "Start",
    "ended_key",
]

# The names of sessions that last; those of starts are named by job and start.
NODES, MEMBERS, SHRINK = "nodes", "members", "shrink"


class Refused(Exception):
    """A process is no member, for this reason."""


class ServedSession(Protocol):
    """Every method returns what the server sends, and to whom."""

    def join(self, peer: Peer, hello: Frame) -> Replies:
        """Admit a member; raise Refused. One that is told a failure instead is no member."""
        ...

    def has(self, peer: Peer) -> bool: ...

    def take(self, peer: Peer, message: Frame) -> Replies:
        """Do what a member asks for; raise ValueError, KeyError or TypeError if it cannot be understood."""
        ...

    def lose(self, peer: Peer, how: str) -> Replies:
        """Note that the connection of a member has ended."""
        ...

    def due(self) -> float:
        """Return when to call `poll`."""
        ...

    def poll(self) -> Replies:
        """Do what is due, or has become possible."""
        ...


def ended_key(rank: int) -> str:
    """Return the key that is set when a member that is no longer needed disconnects from a start."""
    return f"ended/{rank}"


class Start:
    """The store of `size` members of one start: ranks, or the launchers of several hosts. The first failure ends it.

    `in_job`: the rank in the job of each rank: see start_errors.py. `loss`, given the rank of a lost member, its
    process and how its connection has ended, returns the failure; None: the others go on. One that is `strict` fails
    if it refuses a process, too.
    """

    def __init__(
        self,
        size: int,
        in_job: Sequence[int] = (),
        noun: str = "rank",
        loss: Callable[[int, str, str], PeerLost | None] | None = None,
        strict: bool = False,
    ) -> None:
        self.size, self._in_job, self._noun, self._strict = size, in_job, noun, strict
        self._loss = loss or self._lost_rank
        self.failure: RingcommError | None = None
        self.came: dict[int, str] = {}  # the process of every member that has ever joined
        self.present: dict[Peer, int] = {}
        self._values = KeyValues()

    @property
    def complete(self) -> bool:
        return len(self.came) == self.size

    @property
    def over(self) -> bool:
        """Whether nobody needs it any more, but for those who may come late to a failure."""
        return not self.present and (self.complete or self.failure is not None)

    def absent(self) -> list[int]:
        """Return the missing ranks, as in the job; none if nothing says which ranks they are."""
        return [number for rank, number in enumerate(self._in_job) if rank not in self.came]

    def join(self, peer: Peer, hello: Frame) -> Replies:
        rank, size, process = int(hello.fields["rank"]), int(hello.fields["size"]), str(hello.fields["process"])
        refusal = self._refusal(rank, size)
        if refusal and self._strict:
            self.fail(ArgumentError(f"{process}: {refusal}"))
        if refusal:
            raise Refused(refusal)
        if self.failure:
            self.came.setdefault(rank, process)
            return [(peer, encode_failure(self.failure))]
        self.present[peer], self.came[rank] = rank, process
        return [(peer, encode("joined"))]

    def has(self, peer: Peer) -> bool:
        return peer in self.present

    def take(self, peer: Peer, message: Frame) -> Replies:
        if message.kind == "set":
            return self._values.set(str(message.fields["key"]), message.payload)
        if message.kind == "get":
            return self._told(peer, message.fields["id"]) if self.failure else self._values.ask(peer, message)
        if message.kind == "abort":
            self.fail(failure_of(message))
        elif message.kind == "leave":
            self._leave(peer)
        else:
            raise ValueError(message.kind)
        return []

    def fail(self, error: RingcommError) -> None:
        self.failure = self.failure or error

    def lose(self, peer: Peer, how: str) -> Replies:
        rank = self._leave(peer)
        if rank is None:
            return []
        if error := self._loss(rank, self.came[rank], how):
            self.fail(error)
            return []
        return self._values.set(ended_key(rank), b"")

    def due(self) -> float:
        return self._values.due()

    def poll(self) -> Replies:
        """Answer what has failed, or has timed out (with the missing members)."""
        if self.failure:
            return [each for peer, question in self._values.all_waiting() for each in self._told(peer, question.number)]
        if not (overdue := self._values.overdue()):  # the server looks often
            return []
        absent = [rank for rank in range(self.size) if rank not in self.came]
        return [(peer, encode("absent", id=question.number, ranks=absent)) for peer, question in overdue]

    def _refusal(self, rank: int, size: int) -> str:
        if size != self.size or not 0 <= rank < size:
            return f"expected a {self._noun} of {self.size}, got {self._noun} {rank} of {size}"
        if rank in self.came and not self.failure:
            return f"{self._noun} {rank} is already taken by {self.came[rank]}"
        return ""

    def _told(self, peer: Peer, number: int) -> Replies:
        assert self.failure
        return [(peer, encode_failure(self.failure, id=number))]

    def _leave(self, peer: Peer) -> int | None:
        self._values.forget(peer)
        return self.present.pop(peer, None)

    def _lost_rank(self, rank: int, process: str, _: str) -> PeerLost:
        return lost_in_start(rank_in_job(self._in_job, rank), process)


class MemberStore:
    """A store for any number of members, which come and go. What a member has set goes with it.

    Watchers, the launchers of an elastic job, are told every change of a key. `ended` is called when a rank is lost.
    """

    def __init__(self, ended: Callable[[], object] = lambda: None) -> None:
        self._values = KeyValues()
        self._ended = ended
        self._present: dict[Peer, tuple[int, str]] = {}  # the rank in the job, or -1 for a launcher, and the process
        self.lost: dict[int, str] = {}  # the process of every rank that has come, and whose connection has ended
        self._watchers: set[Peer] = set()
        self._set_by: defaultdict[Peer, set[str]] = defaultdict(set)
        self._ever: set[str] = set()  # what every key that was ever set begins with, up to its slash

    def join(self, peer: Peer, hello: Frame) -> Replies:
        rank, _ = self._present[peer] = int(hello.fields["rank"]), str(hello.fields["process"])
        self.lost.pop(rank, None)
        replies: Replies = [(peer, encode("joined"))]
        if hello.fields.get("watch"):
            self._watchers.add(peer)
            replies += [
                (peer, encode("changed", value, key=key, set=True)) for key, value in self._values.items() if key
            ]
        return replies

    def has(self, peer: Peer) -> bool:
        return peer in self._present

    def take(self, peer: Peer, message: Frame) -> Replies:
        if message.kind == "get":
            return self._values.ask(peer, message)
        if message.kind == "leave":
            self._present.pop(peer)  # it is not lost
            return self.lose(peer, "has left")
        if message.kind == "keys":
            begin = str(message.fields["begin"])
            found = [key for key, _ in self._values.items() if key.startswith(begin)]
            return [(peer, encode("keys", id=message.fields["id"], keys=found))]
        key = str(message.fields["key"])
        if message.kind == "set":
            self._set_by[peer].add(key)
            return self.set(key, message.payload)
        if message.kind == "propose":
            return [] if key in self._values else self.set(key, message.payload)
        if message.kind == "delete":
            return self._disown(peer, [key])
        raise ValueError(message.kind)

    def ever_had(self, begin: str) -> bool:
        """Return whether a key `begin`/… was ever set."""
        return begin in self._ever

    def set(self, key: str, value: bytes) -> Replies:
        self._ever.add(key.partition("/")[0])
        change = encode("changed", value, key=key, set=True)
        return [*((watcher, change) for watcher in self._watchers), *self._values.set(key, value)]

    def lose(self, peer: Peer, _: str) -> Replies:
        self._values.forget(peer)
        self._watchers.discard(peer)
        replies = self._disown(peer, self._set_by.get(peer, ()))
        self._set_by.pop(peer, None)
        rank, process = self._present.pop(peer, (-1, ""))
        if rank >= 0 and all(rank != each for each, _ in self._present.values()):
            self.lost[rank] = process
            self._ended()
        return replies

    def due(self) -> float:
        return self._values.due()

    def poll(self) -> Replies:
        return [(peer, encode("absent", id=question.number, ranks=[])) for peer, question in self._values.overdue()]

    def _disown(self, peer: Peer, keys: Iterable[str]) -> Replies:
        replies: Replies = []
        for key in list(keys):
            self._set_by[peer].discard(key)
            if not any(key in each for each in self._set_by.values()):
                self._values.delete(key)
                change = encode("changed", key=key, set=False)
                replies += [(watcher, change) for watcher in self._watchers]
        return replies
