"""Groups: ordered sets of ranks. Members are known by their rank in the world."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NoReturn, Self

from ringcomm.mpi4py.base.constants import IDENT, PROC_NULL, SIMILAR, UNDEFINED, UNEQUAL
from ringcomm.mpi4py.base.errors import ERR_ARG, ERR_GROUP, ERR_RANK, failure
from ringcomm.mpi4py.base.handles import Handle, constant
from ringcomm.mpi4py.base.integers import integer

__all__ = ["GROUP_EMPTY", "GROUP_NULL", "Group"]


class Members:
    """The members of a group, by their rank in the world, and this process's rank in the world."""

    def __init__(self, ranks: tuple[int, ...], own: int) -> None:
        self.ranks, self.own = ranks, own
        self.index = {rank: index for index, rank in enumerate(ranks)}


class Group(Handle):
    """An ordered set of ranks."""

    _object: Members | None
    _named: Members
    _null = ERR_GROUP, "a group", "GROUP_NULL"

    def __new__(cls, group: Any = None, own: int = UNDEFINED) -> Self:
        """Make a null handle, a copy of one, or the group of a tuple of ranks of the world, on rank `own` of it."""
        return cls._of(Members(group, own)) if isinstance(group, tuple) else super().__new__(cls, group)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, by their rank in the world."""
        return self._named.ranks

    def Get_size(self) -> int:
        """Return the number of members."""
        return len(self._named.ranks)

    def Get_rank(self) -> int:
        """Return the rank of this process, UNDEFINED if it is no member."""
        return self._named.index.get(self._named.own, UNDEFINED)

    size, rank = property(Get_size), property(Get_rank)

    def Translate_ranks(self, ranks: Sequence[int] | None = None, group: Group | None = None) -> list[int]:
        """Return the ranks that members, by default all, have in another group, by default that of the world."""
        chosen = range(self.size) if ranks is None else [*map(operator.index, ranks)]
        world = [PROC_NULL if rank == PROC_NULL else self._member(rank) for rank in chosen]
        if group is None:
            return world
        return [PROC_NULL if rank == PROC_NULL else group._named.index.get(rank, UNDEFINED) for rank in world]

    def Compare(self, group: Group) -> int:
        """Return IDENT, SIMILAR (the same members in another order) or UNEQUAL."""
        mine, other = self.ranks, group.ranks
        if mine == other:
            return IDENT
        return SIMILAR if sorted(mine) == sorted(other) else UNEQUAL

    def Dup(self) -> Self:
        """Return a copy."""
        return self._with(self.ranks)

    @classmethod
    def Union(cls, group1: Group, group2: Group) -> Self:
        """Return the group of the members of two groups, those of the first one first."""
        return cls._joined(group1, group2, tuple(dict.fromkeys((*group1.ranks, *group2.ranks))))

    @classmethod
    def Intersection(cls, group1: Group, group2: Group) -> Self:
        """Return the group of the members that two groups have in common, in the order of the first one."""
        return cls._joined(group1, group2, tuple(rank for rank in group1.ranks if rank in group2._named.index))

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: Group, group2: Group) -> Self:
        """Return the group of the members of the first group that are not in the second one."""
        return cls._joined(group1, group2, tuple(rank for rank in group1.ranks if rank not in group2._named.index))

    def Incl(self, ranks: Sequence[int]) -> Self:
        """Return the group of some members, in the order given."""
        chosen = tuple(self._member(operator.index(rank)) for rank in ranks)
        if len({*chosen}) < len(chosen):
            raise failure(ERR_RANK, f"a rank occurs twice in {list(ranks)}")
        return self._with(chosen)

    def Excl(self, ranks: Sequence[int]) -> Self:
        """Return the group without some members."""
        excluded = self.Incl(ranks).ranks
        return self._with(tuple(rank for rank in self.ranks if rank not in excluded))

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        """Return the group of the members in ranges (first, last, step)."""
        return self.Incl(_ranges(ranks))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        """Return the group without the members in ranges (first, last, step)."""
        return self.Excl(_ranges(ranks))

    @classmethod
    def Create_from_session_pset(cls, session: object, pset_name: str) -> NoReturn:
        """Raise NotImplementedError: there are no sessions."""
        raise NotImplementedError("Group.Create_from_session_pset: there are no sessions; use Comm.Get_group")

    def _with(self, ranks: tuple[int, ...]) -> Self:
        return type(self)(ranks, self._named.own)

    @classmethod
    def _joined(cls, group1: Group, group2: Group, ranks: tuple[int, ...]) -> Self:
        own = group1._named.own
        return cls(ranks, group2._named.own if own == UNDEFINED else own)  # GROUP_EMPTY does not know it

    def _member(self, rank: int) -> int:
        """Return the rank in the world of a member."""
        if not 0 <= rank < self.size:
            raise failure(ERR_RANK, f"rank {rank} is not in a group of {self.size}")
        return self.ranks[rank]


def _ranges(triples: Sequence[tuple[int, int, int]]) -> list[int]:
    ranges = [[*map(integer, triple)] for triple in triples]
    if any(step == 0 for _, _, step in ranges):
        raise failure(ERR_ARG, "the step of a range is 0")
    return [rank for first, last, step in ranges for rank in range(first, last + (1 if step > 0 else -1), step)]


GROUP_NULL: Group = constant("GROUP_NULL", Group())
GROUP_EMPTY: Group = constant("GROUP_EMPTY", Group((), UNDEFINED))
