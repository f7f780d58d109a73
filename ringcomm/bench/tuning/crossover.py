"""Where one path of a collective becomes faster than another."""

import math
from itertools import combinations_with_replacement, pairwise

__all__ = ["cuts"]


def cuts(times: list[list[float]]) -> list[int]:
    """Return where each path but the last ends, as a number of sizes, to make all times together shortest.

    `times`: of each path, in the order in which they take larger arrays, the seconds at each size. All sizes weigh the
    same.
    """
    costs = [[math.log(seconds) for seconds in path] for path in times]
    count = len(times[0])

    def cost(ends: tuple[int, ...]) -> float:
        return sum(sum(path[begin:end]) for path, (begin, end) in zip(costs, pairwise((0, *ends, count)), strict=True))

    return [*min(combinations_with_replacement(range(count + 1), len(times) - 1), key=cost)]
