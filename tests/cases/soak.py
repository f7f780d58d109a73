"""Mixed random calls with every result checked.

All ranks draw the same numbers, so each knows what the others call, in which group, and what must come out.
"""

import random
from typing import Any, NamedTuple

import numpy as np
import pytest

from cases.collectives import PLANS, Case, Symmetric, start
from cases.reference import COMBINATIONS, assert_same, filled
from ringcomm import ArgumentError, MismatchError
from ringcomm.types import DTYPES, REDUCING, WHOLE

RANKS = 4
GROUPS = 6  # at most, the world included
PENDING = 25  # asynchronous calls, at most
BUFFER = 1 << 20


class Group(NamedTuple):
    members: list[int]  # ranks of the world
    comm: Any  # None where this rank is no member
    buffer: Any = None  # symmetric


class Soak:
    """One rank."""

    def __init__(self, comm, seed, combinations):
        self.comm = comm
        self.combinations = combinations
        self.draw = random.Random(seed)
        self.groups = [Group(list(range(comm.size)), comm)]
        self.pending = []
        self.calls = self.checks = 0

    def run(self, calls):
        kinds = [getattr(self, name) for name in WEIGHTS]
        for turn in range(calls):
            kind = self.draw.choices(kinds, WEIGHTS.values())[0]
            at = self.draw.choice((0, self.draw.randrange(len(self.groups))))
            pause = self.draw.random() < 0.1
            # With numbers of its own: a rank that takes no part has drawn as many from ours.
            kind(at, random.Random(self.draw.random()), turn)
            if pause or len(self.pending) > PENDING:
                self.wait()
        self.wait()
        while len(self.groups) > 1:
            self.close(1)
        return self.calls, self.checks

    def collective(self, at, draw, turn):
        group = self.groups[at]
        symmetric, case = draw.random() < 0.2, random_case(draw, turn, self.combinations)
        if group.comm is None:
            return
        if symmetric and group.buffer is not None:
            case = case._replace(async_op=False)  # the next call may want the buffer
            finish = start(group.comm, case, 0, Symmetric(group.buffer, case.offset))
        else:
            finish = start(group.comm, case, 0)
        self.later(finish) if case.async_op else self.now(finish)

    def message(self, at, draw, turn):
        """Every rank sends to one rank and receives from one, perhaps itself."""
        group = self.groups[at]
        to = list(range(len(group.members)))
        draw.shuffle(to)
        lengths = [random_length(draw, 1) for _ in to]
        named, blocking, chosen = draw.random() < 0.7, draw.random() < 0.3, draw.choice(list(DTYPES))
        if group.comm is None:
            return
        rank = group.comm.rank
        dest, source = to[rank], to.index(rank)
        x = filled(rank, lengths[rank], chosen, turn)
        expected = filled(source, lengths[source], chosen, turn)
        out = np.empty_like(expected)
        if blocking:
            came = group.comm.sendrecv(x, dest, out, source if named else None, turn)
            works = []
        else:
            works = [group.comm.recv(out, source if named else None, turn, async_op=True)]
            works.append(group.comm.send(x, dest, turn, async_op=True))

        def finish():
            sources = [work.wait() for work in works] or [came, None]
            assert sources == [source, None], f"turn {turn}: from {sources}"
            assert_same(out, expected, f"turn {turn}, rank {rank} from {source}")

        self.now(finish) if blocking else self.later(finish)

    def split(self, at, draw, turn):  # noqa: ARG002
        """Divide a group by three colors; the oldest groups make room."""
        while len(self.groups) > GROUPS - 3:
            self.wait()
            self.close(1)
        group = self.groups[at % len(self.groups)]
        choices = [(draw.choice((0, 0, 1, 2, None)), draw.randrange(3)) for _ in group.members]
        mine = None
        if group.comm is not None:
            mine = group.comm.split(*choices[group.comm.rank])
            self.calls += 1
        for color in sorted({color for color, _ in choices if color is not None}):
            ranks = [rank for rank, (theirs, _) in enumerate(choices) if theirs == color]
            ranks.sort(key=lambda rank: choices[rank][1])
            members = [group.members[rank] for rank in ranks]
            self.groups.append(Group(members, mine if self.comm.rank in members else None))

    def empty(self, at, draw, turn):  # noqa: ARG002
        group = self.groups[at]
        if group.comm is not None:
            buffer = group.comm.empty(BUFFER, "uint8")
            assert not buffer.any()
            self.groups[at] = group._replace(buffer=buffer)
            self.calls += 1

    def objects(self, at, draw, turn):
        group, root = self.groups[at], draw.random()
        if group.comm is not None:
            comm, expected = group.comm, [turn, "x" * (turn % 10_000)]
            chosen = int(root * comm.size)
            assert comm.broadcast_object(expected if comm.rank == chosen else None, chosen) == expected
            assert comm.all_gather_object((turn, comm.rank)) == [(turn, rank) for rank in range(comm.size)]
            self.calls += 2
            self.checks += 2

    def mistake(self, at, draw, turn):
        """Calls that are refused or mismatch leave the group usable and the arrays unchanged."""
        group, odd = self.groups[at], draw.random()
        if group.comm is None:
            return
        comm = group.comm
        x = filled(comm.rank, 9, "float32", turn)
        with pytest.raises(ArgumentError):
            comm.all_reduce(x, "bxor")
        if comm.size > 1:
            length = 5 + (comm.rank == int(odd * comm.size))
            with pytest.raises(MismatchError):
                comm.all_reduce(x[:length])
        assert_same(x, filled(comm.rank, 9, "float32", turn))
        self.calls += 2
        self.checks += 1

    def barrier(self, at, draw, turn):  # noqa: ARG002
        if self.groups[at].comm is not None:
            self.groups[at].comm.barrier()
            self.calls += 1

    def wait(self):
        random.Random(len(self.pending)).shuffle(self.pending)
        while self.pending:
            self.pending.pop()()
            self.checks += 1

    def close(self, at):
        group = self.groups.pop(at)
        if group.comm is not None:
            group.comm.close()

    def now(self, finish):
        finish()
        self.calls += 1
        self.checks += 1

    def later(self, finish):
        self.pending.append(finish)
        self.calls += 1


WEIGHTS = {"collective": 60, "message": 20, "split": 3, "empty": 3, "barrier": 3, "objects": 2, "mistake": 2}


def random_length(draw, item):
    """Return a number of elements: mostly few, sometimes several chunks."""
    most = draw.choice((0, 2, 40, 1_000, 20_000, 20_000, 200_000, 3_000_000 if draw.random() < 0.2 else 40))
    return draw.randrange(most + 1) // item


def random_case(draw, salt, combinations):
    collective = draw.choice(list(PLANS))
    dtype, op = draw.choice(combinations) if collective in REDUCING else (draw.choice(list(DTYPES)), "sum")
    return Case(
        collective,
        (0, random_length(draw, 4 * (1 if collective in WHOLE else RANKS))),
        draw.choice(((), (), (3,), (2, 1, 2))),
        dtype,
        op,
        draw.choice(("default", "out", "in place")),
        draw.random() < 0.4,
        draw.randrange(RANKS),
        draw.choice(("none", "even", "uneven", "zeros")),
        draw.choice((0, 0, 1, 3, 8)),
        salt,
    )


def soak(comm, calls, seed, combinations=COMBINATIONS):
    """Make so many calls in the world and its groups; return how many concerned this rank, and its checks.

    `combinations` are the dtypes and operations of reductions.
    """
    return Soak(comm, seed, combinations).run(calls)
