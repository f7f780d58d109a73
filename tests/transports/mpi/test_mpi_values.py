"""Results under MPI, bit for bit: moved and exact data as on every transport, rounded sums as their schedules define.

Between hosts an algorithm decides in which order a sum is made. So it is compared with the recorded schedule, evaluated
in NumPy; inside a host the sum is made in rank order before that.
"""

from unittest.mock import patch

import numpy as np
import pytest

import mpi_world
from cases import PLANS, pairwise, share, start
from reference import COMBINATIONS, COMPLEX, FLOATS, OPS, assert_same, filled, legal, numpy_dtype, reduced
from ringcomm.algorithms import ALGORITHMS
from ringcomm.algorithms.replay import replay
from ringcomm.algorithms.schedule import Exchange, Lengths, even
from ringcomm.transports.network import transport
from ringcomm.types import REDUCING, WHOLE, PremulSum

pytestmark = pytest.mark.mpi

SEGMENT = 4096  # bytes of a block: what all hosts give is beyond one pass
ONE_PASS = 64  # bytes that travel with the agreement on the call, at least
SIGNED = [(name, op) for name in ("float32", "bfloat16") for op in ("min", "max")]  # of zeros: the later one wins
ROUNDED = [(name, op) for name, op in COMBINATIONS if name in FLOATS + COMPLEX and op not in ("min", "max")]
AXES = {
    "length": [(0, 0), (0, 1), (0, 7), (1, 1), (3, 5)],
    "row": [(), (3,)],
    "dtype": ["bool", "int8", "bfloat16", "float32", "int64", "complex64"],
    "place": ["default", "out", "in place"],
    "async_op": [False, True],
    "root": [0, 1, -1],
    "counts": ["none", "even", "uneven", "zeros"],
    "offset": [0, 1],
}
USUAL = [("mpich", "012"), ("openmpi", "0123"), ("mpich", "0011"), ("openmpi", "0001"), ("mpich", "0101")]


def algorithms(layout, collectives):
    """Yield names of algorithms, and the collectives to call by each of them."""
    if layout in mpi_world.MIXED:  # between two hosts all algorithms are equal
        yield "ring", collectives
        return
    for name in dict.fromkeys(name for collective in collectives for name in ALGORITHMS[collective]):
        yield name, [collective for collective in collectives if name in ALGORITHMS[collective]]


def exact_cases(collective):
    """Return cases of a collective; reductions have operations whose result does not depend on the order."""
    for case in pairwise({**AXES, "collective": [collective]}):
        if collective not in REDUCING:
            yield case
        elif ops := [op for op in OPS if legal(case.dtype, op) and (case.dtype, op) not in ROUNDED]:
            yield case._replace(op=ops[case.salt % len(ops)])


def check_exact(comm, collectives):
    for collective in collectives:
        for case in exact_cases(collective):
            start(comm, case, SEGMENT)()


@pytest.mark.parametrize(("library", "layout"), mpi_world.worlds(*USUAL))
def test_moved_and_exact_data_are_the_same_as_on_other_transports(library, layout):
    for name, collectives in algorithms(layout, [*PLANS]):
        mpi_world.run(check_exact, layout, collectives, library=library, algorithm=name)


# --- Sums that are rounded --------------------------------------------------------------------------------------------


def by_schedule(algorithm, inputs, op, rows, root, layout):
    """Return the whole result of a reduction; `rows` are the shares of a reduce_scatter."""
    if isinstance(op, PremulSum):
        inputs, op = [reduced([x], op) for x in inputs], "sum"
    size, step = len(inputs), "sum" if op == "avg" else op
    hosts = hosts_of(layout)
    here = [reduced([inputs[rank] for rank in ranks], step) for ranks in hosts]
    if inputs[0].nbytes <= ONE_PASS:  # each rank has the sums of all hosts
        result = reduced(here, step)
        return result if op != "avg" else divided(result, size)
    result = np.empty_like(inputs[0])
    for where, lengths in rails(algorithm.collective, hosts, result.size, rows):
        ends = replay(
            algorithm,
            [x[where] for x in here],
            lambda a, b: reduced([a, b], step),
            lengths=[lengths] * len(hosts),
            root=next(host for host, ranks in enumerate(hosts) if root in ranks),
        )
        result[where] = np.concatenate(ends) if algorithm.collective == "reduce_scatter" else max(ends, key=np.size)
    return result if op != "avg" else divided(result, size)


def hosts_of(layout):
    """Return the ranks of each host."""
    return [[rank for rank, other in enumerate(layout) if other == letter] for letter in dict.fromkeys(layout)]


def rails(collective, hosts, count, rows):
    """Yield the elements of each rail, and how they are divided among the hosts."""
    number = min(map(len, hosts))
    if collective != "reduce_scatter":
        for part in np.split(np.arange(count), np.cumsum(even(count, number))[:-1]):
            yield part, Lengths(even(part.size, len(hosts)))
        return
    blocks = [np.arange(count)[share(rows, rank)] for rank in range(len(rows))]
    of_hosts = [np.concatenate([blocks[rank] for rank in ranks]) for ranks in hosts]
    parts = [np.split(whole, np.cumsum(even(whole.size, number))[:-1]) for whole in of_hosts]
    for mine in zip(*parts, strict=True):
        yield np.concatenate(mine), Lengths(tuple(part.size for part in mine))


def divided(x, n):
    """Return the average: a sum divided by n, rounded from the accumulation type."""
    parts = x.view(f"f{x.itemsize // 2}") if x.dtype.kind == "c" else x
    wide = parts.astype(np.float32) if x.dtype.name in ("float16", "bfloat16") else parts
    return (wide / wide.dtype.type(n)).astype(parts.dtype).view(x.dtype)


def uneven(count, size):
    rows = [0] * size
    rows[1] += count - count // 3
    rows[-1] += count // 3
    return rows


def values(rank, count, dtype, op, salt):
    """Return the array of a rank: for min and max zeros of both signs, since only they show the order."""
    if op in ("min", "max"):
        return np.where(filled(rank, count, "bool", salt), 0.0, -0.0).astype(numpy_dtype(dtype))
    return filled(rank, count, dtype, salt)


def check_rounded(comm, layout, collectives, chosen, calls):
    """Check each reduction in `calls`, in place and not, with all roots and shares."""
    size, me = comm.size, comm.rank
    for collective in collectives:
        algorithm = ALGORITHMS[collective].get(chosen) or next(iter(ALGORITHMS[collective].values()))
        for number, (count, (dtype, op)) in enumerate(calls):
            root = number % size
            rows = even(count, size) if number % 2 else uneven(count, size)
            inputs = [values(rank, count, dtype, op, number) for rank in range(size)]
            expected = by_schedule(algorithm, inputs, op, rows, root, layout)
            x, out = inputs[me].copy(), np.empty(count, numpy_dtype(dtype)) if number % 3 else None
            what = f"{algorithm.title} of {count} {dtype}, {op}, call {number} on {layout}"
            if collective == "all_reduce":
                result = comm.all_reduce(x, op, out)
            elif collective == "reduce":
                result = comm.reduce(x, op, root, out)
                assert (result is None) == (me != root), what
            else:
                mine = share(rows, me)
                result = comm.reduce_scatter(x, op, None if out is None else out[mine], counts=rows)
                expected = expected[mine]
            assert (comm._transport.path()[0] == "one-pass") == (x.nbytes <= ONE_PASS), what
            if result is not None:
                assert_same(result, expected, what)
            if result is not x:
                assert_same(x, inputs[me], f"the input of {what}")


def reduce_by_all(library, layout, calls):
    for name, collectives in algorithms(layout, REDUCING):
        mpi_world.run(check_rounded, layout, layout, collectives, name, calls, library=library, algorithm=name)


@pytest.mark.parametrize(("library", "layout"), mpi_world.worlds(*USUAL))
def test_sums_are_rounded_as_the_schedule_defines(library, layout):
    calls = [*((count, ("float32", "sum")) for count in (0, 1, 7)), *((5001, kind) for kind in ROUNDED + SIGNED)]
    reduce_by_all(library, layout, calls)


@pytest.mark.parametrize(("library", "layout"), mpi_world.worlds(("openmpi", "01"), ("mpich", "0011")))
def test_sums_of_large_messages_are_rounded_as_the_schedule_defines(library, layout):
    reduce_by_all(library, layout, [(1_100_001, ("float32", "sum"))])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("library", "layout"), mpi_world.worlds())
def test_sums_of_all_lengths_are_rounded_as_the_schedule_defines(library, layout):
    calls = [(count, kind) for count in (0, 1, 2, 3, 5, 8, 13, 1024, 4097, 99_991) for kind in ROUNDED + SIGNED]
    reduce_by_all(library, layout, calls)


# --- Bytes between hosts ----------------------------------------------------------------------------------------------

COUNT = 16_800  # elements of the larger array: divided among 4 ranks, 3 hosts, 2 rails


def call_evenly(comm, collectives):
    """Make each call; return its path, and the bytes that this rank's program sends to other hosts."""
    calls, programs = [], []

    def program_of(layout, call, *args):
        programs.append(make(layout, call, *args))
        return programs[-1]

    make = transport.program_of
    with patch.object(transport, "program_of", program_of):
        for collective in collectives:
            call(comm, collective)
            sends = (step.outgoing.length for step in programs.pop().steps if isinstance(step, Exchange))
            calls.append((comm._transport.path()[0], 8 * sum(sends)))
    assert not programs
    return calls


def call(comm, collective):
    x = np.ones(COUNT if collective not in ("gather", "all_gather") else COUNT // comm.size)
    if collective == "scatter":
        comm.scatter(x if comm.rank == 0 else None, np.empty(COUNT // comm.size))
    else:
        getattr(comm, collective)(x)


@pytest.mark.parametrize("name", sorted({name for collective in PLANS for name in ALGORITHMS[collective]}))
@pytest.mark.parametrize(
    "layout",
    ["012", "0123", "0011", "0001", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("0101", "0112"))],
)
def test_the_bytes_between_hosts_are_those_of_the_formula(layout, name):
    hosts = hosts_of(layout)
    number = min(map(len, hosts))
    collectives = [collective for collective in PLANS if name in ALGORITHMS[collective]]
    results = zip(*mpi_world.run(call_evenly, layout, collectives, algorithm=name), strict=True)
    for collective, calls in zip(collectives, results, strict=True):
        paths, sent = zip(*calls, strict=True)
        what = f"{collective} by {name}: {sent}"
        if collective == "all_to_all" and layout in mpi_world.MIXED:
            assert all(sent[rank] == (4 - len(ranks)) * COUNT // 4 * 8 for ranks in hosts for rank in ranks), what
            continue
        assert not any(sent[rank] for ranks in hosts for rank in ranks[number:]), what
        if number < max(map(len, hosts)) and collective not in WHOLE:
            continue  # the hosts' blocks are not equal
        for place in range(number):
            assert {paths[ranks[place]] for ranks in hosts} <= {name}, what
            most = max(sent[ranks[place]] for ranks in hosts)
            assert most == ALGORITHMS[collective][name].sent(len(hosts), COUNT // number) * 8, what
