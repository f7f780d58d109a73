"""Ranks on several hosts, and what their reductions must be, bit for bit.

A layout has one character per rank: its host. Sums are made in rank order inside a host, then as the recorded schedule
defines.
"""

from dataclasses import replace

import numpy as np
import pytest

import harness
from cases.collectives import pairwise, share, start
from cases.reference import (
    COMBINATIONS,
    COMPLEX,
    FLOATS,
    OPS,
    assert_same,
    divided,
    filled,
    legal,
    numpy_dtype,
    reduced,
)
from harness import pools
from ringcomm import Communicator
from ringcomm.algorithms import ALGORITHMS
from ringcomm.algorithms.cost import CLUSTER
from ringcomm.algorithms.replay import replay
from ringcomm.algorithms.schedule import Lengths, even
from ringcomm.testing import connect_threads, run_threads
from ringcomm.transports import network
from ringcomm.transports.network.program_recorder import number_of_chunks
from ringcomm.types import COLLECTIVES, PremulSum

CHUNK = 1 << 10  # bytes of a chunk of what is staged between GPUs, with the fixture small_chunks
ONE_SHOT = 64  # bytes that travel with the agreement on the call, at least
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


def connect_on(layout, **settings):
    """Connect ranks that are threads of this process; return their communicators."""

    def connect(rank, size, store, config):
        return network.connect(rank, size, store, replace(config, host_id=layout[rank], **settings))

    return [Communicator(end) for end in connect_threads(connect, len(layout), harness.OPERATION)]


def run_on(layout, fn, *args, **settings):
    """Call `fn(comm, *args)` on ranks that are threads, and return the results in rank order."""
    return run_threads(lambda comm: fn(comm, *args), connect_on(layout, **settings))


def on_layouts(*layouts, **settings):
    """Make a test, on each of the layouts, of a function that each rank calls; it may take the layout, and fixtures."""

    def start(test, place, args):
        run_on(place["layout"], test.on_rank, *args, **settings)

    return lambda fn: pytest.mark.parametrize("layout", layouts)(pools.made_test(fn, ["layout"], start))


def everywhere(fn):
    """Make a test of a function that each of two ranks calls: threads, processes, and on two hosts (the fixture)."""
    return pools.made_test(fn, ["run"], lambda test, place, args: place["run"](pools.call, test, *args))


def algorithms(layout, collectives):
    """Yield names of algorithms, and the collectives to call by each of them."""
    if len({*layout}) == 2 < len(layout):  # between two hosts all algorithms are equal
        yield "ring", collectives
        return
    for name in dict.fromkeys(name for collective in collectives for name in ALGORITHMS[collective]):
        yield name, [collective for collective in collectives if name in ALGORITHMS[collective]]


def exact_cases(collective):
    """Return cases of a collective; reductions have operations whose result does not depend on the order."""
    for case in pairwise({**AXES, "collective": [collective]}):
        if not COLLECTIVES[collective].reduces:
            yield case
        elif ops := [op for op in OPS if legal(case.dtype, op) and (case.dtype, op) not in ROUNDED]:
            yield case._replace(op=ops[case.salt % len(ops)])


def check_exact(comm, collectives, segment):
    for collective in collectives:
        for case in exact_cases(collective):
            start(comm, case, segment)()


def by_schedule(algorithm, inputs, op, rows, root, layout, link):
    """Return the whole result of a reduction; `rows` are the shares of a reduce_scatter."""
    if isinstance(op, PremulSum):
        inputs, op = [reduced([x], op) for x in inputs], "sum"
    size, step = len(inputs), "sum" if op == "avg" else op
    hosts = hosts_of(layout)
    here = [reduced([inputs[rank] for rank in ranks], step) for ranks in hosts]
    if inputs[0].nbytes <= ONE_SHOT:  # each rank has the sums of all hosts
        result = reduced(here, step)
        return result if op != "avg" else average(result, size)
    result = np.empty_like(inputs[0])
    for where, lengths in rails(algorithm.collective, hosts, result, rows, link):
        ends = replay(
            algorithm,
            [x[where] for x in here],
            lambda a, b: reduced([a, b], step),
            lengths=[lengths] * len(hosts),
            root=next(host for host, ranks in enumerate(hosts) if root in ranks),
        )
        result[where] = np.concatenate(ends) if algorithm.collective == "reduce_scatter" else max(ends, key=np.size)
    return result if op != "avg" else average(result, size)


def hosts_of(layout):
    """Return the ranks of each host."""
    return [[rank for rank, other in enumerate(layout) if other == letter] for letter in dict.fromkeys(layout)]


def rails(collective, hosts, result, rows, link):
    """Yield the elements of each rail in each chunk, and how they are divided among the hosts."""
    number = min(map(len, hosts))
    if collective != "reduce_scatter":
        chunks = number_of_chunks(result.nbytes, number, len(hosts), link) if max(map(len, hosts)) > 1 else 1
        for chunk in split_evenly(np.arange(result.size), chunks):
            for part in split_evenly(chunk, number):
                yield part, Lengths(even(part.size, len(hosts)))
        return
    blocks = [np.arange(result.size)[share(rows, rank)] for rank in range(len(rows))]
    of_hosts = [np.concatenate([blocks[rank] for rank in ranks]) for ranks in hosts]
    parts = [split_evenly(whole, number) for whole in of_hosts]
    for mine in zip(*parts, strict=True):
        yield np.concatenate(mine), Lengths(tuple(part.size for part in mine))


def split_evenly(x, parts):
    return np.split(x, np.cumsum(even(x.size, parts))[:-1])


def average(x, n):
    """Return a sum divided by n, rounded from the accumulation type."""
    parts = x.view(f"f{x.itemsize // 2}") if x.dtype.kind == "c" else x
    wide = parts.astype(np.float32) if x.dtype.name in ("float16", "bfloat16") else parts
    return divided(wide, n).astype(parts.dtype).view(x.dtype)


def uneven(count, size):
    rows = [0] * size
    rows[1] += count - count // 3
    rows[-1] += count // 3
    return rows


def values(rank, count, dtype, op, salt):
    """Return the array of a rank: for min and max of floats zeros of both signs, since only they show the order."""
    if op in ("min", "max") and dtype in FLOATS:
        return np.where(filled(rank, count, "bool", salt), 0.0, -0.0).astype(numpy_dtype(dtype))
    return filled(rank, count, dtype, salt)


def check_rounded(comm, layout, collectives, chosen, calls, link=CLUSTER.inter_node):
    """Check each reduction in `calls`, in place and not, with all roots and shares."""
    size, me = comm.size, comm.rank
    for collective in collectives:
        algorithm = ALGORITHMS[collective].get(chosen) or next(iter(ALGORITHMS[collective].values()))
        for number, (count, (dtype, op)) in enumerate(calls):
            root = number % size
            rows = even(count, size) if number % 2 else uneven(count, size)
            inputs = [values(rank, count, dtype, op, number) for rank in range(size)]
            expected = by_schedule(algorithm, inputs, op, rows, root, layout, link)
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
            assert (comm._transport.path()[0] == "one-shot") == (x.nbytes <= ONE_SHOT), what
            if result is not None:
                assert_same(result, expected, what)
            if result is not x:
                assert_same(x, inputs[me], f"the input of {what}")
