"""Collective calls as data: what a rank passes and what it must get. For the tests of values, and the soak."""

import random
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from cases.reference import assert_same, filled, numpy_dtype, reduced
from ringcomm.types import COLLECTIVES, ROOTED

MARGIN, UNTOUCHED = 64, 0xA5  # bytes around every array, and what they hold


class Case(NamedTuple):
    """One call, as all ranks know it."""

    collective: str
    length: tuple[int, int] = (0, 1)  # elements of a block: so many segments, and so many more
    row: tuple[int, ...] = ()  # the shape below axis 0
    dtype: str = "float32"
    op: Any = "sum"
    place: str = "default"  # "default": no `out`; "out": an array of its own; "in place": as far as that is allowed
    async_op: bool = False
    root: int = 0  # modulo the size
    counts: str = "none"
    offset: int = 0  # bytes that the arrays lie beside their natural alignment
    salt: int = 0  # makes the data of one case differ from those of another


def pairwise(axes, seed=0):
    """Return a few cases that cover every pair of values of any two axes."""
    draw = random.Random(seed)
    cells = {name: [(name, i) for i in range(len(values))] for name, values in axes.items()}
    missing = {pair for a, b in combinations(axes, 2) for pair in product(cells[a], cells[b])}
    cases = []
    while missing:
        start = dict(min(missing))
        tries = [[(name, start.get(name, draw.randrange(len(axes[name])))) for name in axes] for _ in range(10)]
        best = max(tries, key=lambda cells: len(missing.intersection(combinations(cells, 2))))
        missing.difference_update(combinations(best, 2))
        cases.append(Case(**{name: axes[name][i] for name, i in best}, salt=len(cases)))
    return cases


# --- What a rank passes and gets; for calls in place, which part of the larger array the smaller one is ---------------


class Plan(NamedTuple):
    source: np.ndarray | None
    expected: np.ndarray | None
    part: Any = None
    counts: dict[str, list[int]] = {}  # noqa: RUF012


def elements(case, segment):
    return case.length[0] * segment // numpy_dtype(case.dtype).itemsize + case.length[1]


def rows_of(case, size, rows):
    """Return the rows of each rank."""
    return {
        "none": [rows] * size,
        "even": [rows] * size,
        "uneven": [rows + rank for rank in range(size)],
        "zeros": [rows * ((size - rank) % 2) for rank in range(size)],
    }[case.counts]


def rows_between(case, size, rows):
    """Return how many rows go from rank i to rank j of all_to_all."""
    return {
        "none": [[rows] * size for _ in range(size)],
        "even": [[rows] * size for _ in range(size)],
        "uneven": [[rows + 2 * i + j for j in range(size)] for i in range(size)],
        "zeros": [[rows * ((i + j) % 2) for j in range(size)] for i in range(size)],
    }[case.counts]


def value(case, rank, rows):
    return filled(rank, (rows, *case.row), case.dtype, case.salt)


def plan_broadcast(rank, size, case, rows):
    return Plan(value(case, rank, rows), value(case, case.root % size, rows), ...)


def plan_all_reduce(rank, size, case, rows):
    inputs = [value(case, p, rows) for p in range(size)]
    return Plan(inputs[rank], reduced(inputs, case.op), ...)


def plan_reduce(rank, size, case, rows):
    plan = plan_all_reduce(rank, size, case, rows)
    return plan if rank == case.root % size else Plan(plan.source, None)


def plan_all_gather(rank, size, case, rows):
    counts = rows_of(case, size, rows)
    blocks = [value(case, p, counts[p]) for p in range(size)]
    if case.counts == "none":
        return Plan(blocks[rank], np.stack(blocks), rank)
    return Plan(blocks[rank], np.concatenate(blocks), share(counts, rank), {"counts": counts})


def plan_gather(rank, size, case, rows):
    plan = plan_all_gather(rank, size, case, rows)
    return plan if rank == case.root % size else plan._replace(expected=None)


def plan_reduce_scatter(rank, size, case, rows):
    counts = rows_of(case, size, rows)
    whole = plan_all_reduce(rank, size, case, sum(counts))
    part = share(counts, rank)
    return Plan(whole.source, whole.expected[part], part, {} if case.counts == "none" else {"counts": counts})


def plan_scatter(rank, size, case, rows):
    counts, root = rows_of(case, size, rows), case.root % size
    whole, part = value(case, root, sum(counts)), share(counts, rank)
    counted = {} if case.counts == "none" else {"counts": counts}
    return Plan(whole if rank == root else None, whole[part], part, counted)


def plan_all_to_all(rank, size, case, rows):
    between = rows_between(case, size, rows)
    sources = [value(case, p, sum(between[p])) for p in range(size)]
    expected = np.concatenate([x[share(counts, rank)] for x, counts in zip(sources, between, strict=True)])
    if case.counts == "none":
        return Plan(sources[rank], expected, ...)
    counts = {"send_counts": between[rank], "recv_counts": [counts[rank] for counts in between]}
    return Plan(sources[rank], expected, slice(None) if case.counts == "even" else None, counts)


def share(counts, rank):
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


PLANS = {name.removeprefix("plan_"): plan for name, plan in list(globals().items()) if name.startswith("plan_")}


# --- Arrays -----------------------------------------------------------------------------------------------------------


class Arrays:
    """Makes the arrays of a call, at odd addresses if need be, and checks that nothing beside them changed."""

    def __init__(self, offset):
        self.begin = MARGIN + offset
        self.frames = []

    def memory(self, size):
        return np.empty(size, np.uint8)

    def blank(self, like):
        frame = self.memory(self.begin + like.nbytes + MARGIN)
        frame.fill(UNTOUCHED)
        self.frames.append((frame, like.nbytes))
        return frame[self.begin : self.begin + like.nbytes].view(like.dtype).reshape(like.shape)

    def copy(self, values):
        x = self.blank(values)
        x[...] = values
        return x

    def assert_intact(self, what):
        for frame, size in self.frames:
            around = np.concatenate([frame[: self.begin], frame[self.begin + size :]])
            assert (around == UNTOUCHED).all(), f"{what}: wrote outside of the array"


class Exporter:
    """An object that supports DLPack only."""

    def __init__(self, data):
        self.data = data

    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.data.__dlpack_device__()


class Symmetric(Arrays):
    """Takes the memory from a symmetric buffer: the first array from its first half, the other from its second.

    What does not fit becomes an ordinary array.
    """

    def __init__(self, buffer, offset):
        super().__init__(offset)
        self.halves = np.split(buffer, 2)

    def memory(self, size):
        half = self.halves[len(self.frames)]
        return half[:size] if size <= half.size else super().memory(size)


# --- The call ---------------------------------------------------------------------------------------------------------


def start(comm, case, segment, arrays=None):
    """Make the call of a case; return a function that waits for it and checks everything about its result."""
    arrays = arrays or Arrays(case.offset)
    # A chunk of an all_reduce has a segment for each rank.
    chunk = segment * comm.size if case.collective in ("all_reduce", "reduce") else segment
    rows = elements(case, chunk) // int(np.prod(case.row))
    source, expected, part, options = PLANS[case.collective](comm.rank, comm.size, case, rows)

    x = out = None
    after = source  # what x must hold in the end
    inside = case.place == "in place" and part is not None and source is not None and expected is not None
    has_out = expected is not None and case.collective != "broadcast"
    if source is None:
        out = arrays.blank(expected)
    elif inside and has_out and expected.size >= source.size:
        out = arrays.blank(expected)
        x = out[part]
        x[...] = source
        after = expected[part]
    else:
        x = arrays.copy(source)
        if inside and has_out:
            out, after = x[part], source.copy()
            after[part] = expected
        elif case.place != "default" and has_out:
            out = arrays.blank(expected)
        elif part is ... and expected is not None:  # in place by itself
            after = expected

    options = dict(options, async_op=case.async_op)
    if out is not None:
        options["out"] = out
    if case.collective in ROOTED:
        options["root"] = case.root % comm.size
    if COLLECTIVES[case.collective].reduces:
        options["op"] = case.op
    returned = getattr(comm, case.collective)(x, **options)

    def finish():
        result = returned.wait() if case.async_op else returned
        what = f"rank {comm.rank} of {comm.size}, {case}"
        if expected is None:
            assert result is None, what
        elif out is not None:
            assert result is out, what
        elif part is ...:
            assert result is x, what
        else:
            assert not np.shares_memory(result, x), what
        if expected is not None:
            assert_same(result, expected, what)
        if x is not None:
            assert_same(x, after, f"the input of {what}")
        arrays.assert_intact(what)

    return finish
