"""The hosts of a group's ranks, and its rails."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ringcomm.algorithms.schedule import even
from ringcomm.machine import topology

__all__ = ["HostLayout", "layout_of"]


@dataclass(frozen=True)
class HostLayout:
    """The hosts of a group's ranks, seen from one rank.

    A *rail* joins the ranks of one index on each host: rail i joins the i-th ranks of all hosts. There are as many
    rails as the smallest host has ranks.
    """

    ranks: tuple[tuple[int, ...], ...]  # of each host, in the order of their local ranks
    host: int
    local_rank: int

    @property
    def rails(self) -> int:
        return min(map(len, self.ranks))

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return self.ranks[self.host]

    @property
    def rail(self) -> tuple[int, ...]:
        """Return the ranks of this rank's rail, by host; none for a rank without a rail."""
        return tuple(ranks[self.local_rank] for ranks in self.ranks) if self.local_rank < self.rails else ()

    def neighbors(self) -> list[int]:
        """Return the ranks to which this one is connected from the start: one at least on each other host.

        Those of its rail; a rank beyond the rails, or on a smaller host, has those of the same index, counted around.
        """
        mine, here = self.local_rank, len(self.local_ranks)
        return [
            rank
            for host, ranks in enumerate(self.ranks)
            for index, rank in enumerate(ranks)
            if host != self.host and (index == mine % len(ranks) or index % here == mine)
        ]

    def slices(self, count: int) -> list[int]:
        """Divide elements among the ranks of this host; ranks without a rail get none."""
        return [*even(count, self.rails), *[0] * (len(self.local_ranks) - self.rails)]

    def yields_early(self, cores: Sequence[Collection[int]]) -> bool:
        """Return whether waiting ranks leave their cores early, given the cores of each rank on this machine."""
        # A rank of several on its host mostly waits for another host: the others can have the core.
        return 1 < len(self.ranks) < sum(map(len, self.ranks)) or topology.outnumbered(cores)

    def locate(self, rank: int) -> tuple[int, int]:
        """Return the host and the local rank of a rank."""
        return next((host, ranks.index(rank)) for host, ranks in enumerate(self.ranks) if rank in ranks)


def layout_of(rank: int, hosts: Sequence[object]) -> HostLayout:
    """Return the layout seen from `rank`, given the host of each rank. Hosts are in the order of their first ranks."""
    ranks: dict[object, list[int]] = {}
    for each, host in enumerate(hosts):
        ranks.setdefault(host, []).append(each)
    here = hosts[rank]
    return HostLayout(tuple(map(tuple, ranks.values())), [*ranks].index(here), ranks[here].index(rank))
