"""All algorithms as a page, docs/algorithms.md, and as a table."""

import sys
from collections.abc import Iterator
from inspect import getdoc

from ringcomm.algorithms.schedule import ALGORITHMS, Algorithm

__all__ = ["page", "table"]

COLUMNS = ("collective", "algorithm", "steps", "sent", "scratch", "needs")
HEAD = """\
# Algorithms

Written by `python -m ringcomm.algorithms`, from the docstrings and formulas in `ringcomm/algorithms/`.

Where ranks can only send messages, an algorithm says who sends what to whom. It is a function that tells a `Port` what
one rank does. Nothing is sent then: what it tells is written down, and this *schedule* is proved, priced, drawn, and
carried out. So an algorithm knows ranks and lengths, and never a value.

`ringcomm.testing.prove(algorithm)` carries out the schedules of all ranks, for 2 to 64 of them, on symbols in place of
data, with nothing buffered. It raises, with rank and step, if a send does not meet its receive, if ranks wait for each
other for ever, if something is read that was not written, if an element does not arrive or is added twice, or if a
formula is wrong. A new algorithm is one more function with `@algorithm`; proof, tables and this page find it.

In the formulas, n are the ranks, p is the largest power of two within n, and S are the elements of the larger array.
A comparison in brackets is 1 where it holds, else 0; bits(n) counts the ones in all the numbers below n, in binary,
n / 2 * log2(n) for a power of two. *Steps* are the exchanges that follow on each other until the last rank is done.
*Sent* and *scratch* (memory beside the arrays) are elements, on the rank that has most of them, where arrays divide
evenly.
"""


def page() -> str:
    """Return docs/algorithms.md."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield HEAD
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---|---|---|---|---|---|"
    for collective, name, *formulas, needs in table():
        yield f"| {collective} | {name} | {' | '.join(f'`{formula}`' for formula in formulas)} | {needs} |"
    for module, algorithms in _by_module().items():
        yield f"\n## {module.rpartition('.')[2].capitalize()}\n\n{getdoc(sys.modules[module])}"
        for each in algorithms:
            yield f"\n### {each.title}\n\n{getdoc(each.tell)}"
    yield ""


def table() -> Iterator[tuple[str, ...]]:
    """Yield the COLUMNS of every algorithm."""
    for collective, named in sorted(ALGORITHMS.items()):
        for name, each in sorted(named.items()):
            needs = ["equal blocks"] * each.equal_blocks + ["two arrays"] * (not each.in_place)
            yield collective, name, each.steps, each.sent, each.scratch, ", ".join(needs)


def _by_module() -> dict[str, list[Algorithm]]:
    modules: dict[str, list[Algorithm]] = {}
    for each in (each for named in ALGORITHMS.values() for each in named.values()):
        modules.setdefault(each.tell.__module__, []).append(each)
    return dict(sorted(modules.items()))
