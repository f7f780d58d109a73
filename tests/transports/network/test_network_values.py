"""Results between hosts, bit for bit: moved and exact data as on every transport, rounded sums in the documented order.

A small collective is one-shot: hosts in order, rounded once. A large one follows the schedule of an algorithm.
"""

import numpy as np
import pytest
import test_point_to_point as messages

from cases.between_hosts import (
    ROUNDED,
    SIGNED,
    algorithms,
    average,
    check_exact,
    check_rounded,
    hosts_of,
    run_on,
    uneven,
    values,
)
from cases.collectives import PLANS, Case, share, start
from cases.reference import OPS, assert_same, filled, numpy_dtype, reduced
from ringcomm.algorithms.cost import LinkCost
from ringcomm.algorithms.schedule import even
from ringcomm.testing import run_threads
from ringcomm.transports.network import recorder
from ringcomm.types import DTYPES, REDUCING, WHOLE, PremulSum

ONE_SHOT, SLOT = 8 << 10, 384  # bytes: of a host with one rank, of each rank of a larger host
PIECE = 256 << 10  # bytes: of a transfer
USUAL = ("01", "0011", "0001", "0123", "010")
MORE = ("012", "0101", "0112", "01012")

layouts = pytest.mark.parametrize("layout", USUAL)
all_layouts = pytest.mark.parametrize("layout", [*USUAL, *MORE])


# --- Moved and exact data ---------------------------------------------------------------------------------------------


@layouts
def test_moved_and_exact_data_are_the_same_as_on_other_transports(layout):
    for name, collectives in algorithms(layout, [*PLANS]):
        run_on(layout, check_exact, collectives, 4096, algorithm=name)


@pytest.mark.exhaustive
@all_layouts
@pytest.mark.parametrize("segment", [SLOT, ONE_SHOT, PIECE])
def test_moved_and_exact_data_of_all_sizes(layout, segment):
    for name, collectives in algorithms(layout, [*PLANS]):
        run_on(layout, check_exact, collectives, segment, algorithm=name)


def check_sizes(comm, collectives, sizes):
    """Make calls on blocks of so many bytes; return the paths by collective and size."""
    paths = {}
    for collective in collectives:
        for size in sizes:
            check_integers(comm, collective, size // 8)
            paths[collective, size] = comm._transport.path()[0]
    return paths


def around(size):
    """Return sizes of one element of 8 bytes less, equal, and one more."""
    return size - 8, size, size + 8


def check_integers(comm, collective, count):
    """Call a collective on blocks of `count` integers of 8 bytes."""
    start(comm, Case(collective, (0, count), dtype="int64", root=comm.size - 1), 1)()


@layouts
def test_calls_around_the_sizes_where_the_path_changes(layout):
    size = len(layout)
    limit = ONE_SHOT if len({*layout}) == size else SLOT
    sizes = [*around(limit), *around(limit // size // 8 * 8)]
    for paths in run_on(layout, check_sizes, [*PLANS], sizes):
        for name in ("all_reduce", "reduce", "broadcast"):
            assert [paths[name, each] == "one-shot" for each in around(limit)] == [True, True, False]


@layouts
def test_calls_around_the_length_of_a_piece(layout):
    hosts = hosts_of(layout)
    slices = PIECE * min(map(len, hosts))  # of an all_reduce by recursive doubling, which sends whole slices
    sizes = [*around(slices), *around(4 * slices), 9 * slices + 8]
    run_on(layout, check_sizes, ["all_reduce", "reduce", "broadcast"], sizes, algorithm="recursive_doubling")
    sizes = around(slices * len(hosts))  # ring divides the slices
    run_on(layout, check_sizes, ["all_reduce", "broadcast"], sizes, algorithm="ring")
    run_on(layout, check_sizes, [name for name in PLANS if name not in WHOLE], around(PIECE))


# --- Sums that are rounded --------------------------------------------------------------------------------------------


@layouts
def test_large_sums_are_rounded_as_the_schedule_defines(layout):
    calls = [(5001, kind) for kind in ROUNDED + SIGNED]
    for name, collectives in algorithms(layout, REDUCING):
        run_on(layout, check_rounded, layout, collectives, name, calls, algorithm=name)


@layouts
def test_sums_of_several_pieces_are_rounded_as_the_schedule_defines(layout):
    calls = [(1_100_001, ("bfloat16", "avg")), (700_001, ("float32", OPS[-1])), (700_001, ("float32", "sum"))]
    run_on(layout, check_rounded, layout, REDUCING, "ring", calls, algorithm="ring")


@pytest.mark.parametrize("layout", ["0011", "0001", "01012", "0112"])
def test_chunks_have_the_same_bits_and_the_sums_of_the_schedule(layout, monkeypatch):
    monkeypatch.setattr(recorder, "MESSAGE_BYTES", 1000)
    slow = {"algorithm": "ring", "link_bandwidth": 0.1}
    run_on(layout, check_sizes, ["all_reduce", "reduce", "broadcast"], [7992, 8000, 8008, 40_000], **slow)
    calls = [(9001, kind) for kind in ROUNDED]
    run_on(layout, check_rounded, layout, ["all_reduce", "reduce"], "ring", calls, LinkCost(0, 1e-8), **slow)


@pytest.mark.exhaustive
@all_layouts
def test_sums_of_all_lengths_are_rounded_as_the_schedule_defines(layout):
    calls = [(count, kind) for count in (4097, 9001, 99_991) for kind in ROUNDED + SIGNED]
    for name, collectives in algorithms(layout, REDUCING):
        run_on(layout, check_rounded, layout, collectives, name, calls, algorithm=name)


def in_one_shot(inputs, op, layout):
    """Return the reduction of a small call: inside each host in rank order, then hosts in order, rounded once."""
    if isinstance(op, PremulSum):
        inputs, op = [reduced([x], op) for x in inputs], "sum"
    step = "sum" if op == "avg" else op
    result = reduced([reduced([inputs[rank] for rank in ranks], step) for ranks in hosts_of(layout)], step)
    return average(result, len(inputs)) if op == "avg" else result


def check_one_shot(comm, layout):
    size, me = comm.size, comm.rank
    for number, (dtype, op) in enumerate(ROUNDED + SIGNED):
        for count in (0, 1, 7, SLOT // numpy_dtype(dtype).itemsize):
            root, what = number % size, f"{count} {dtype}, {op} on {layout}"
            rows = even(count, size) if number % 2 else uneven(count, size)
            inputs = [values(rank, count, dtype, op, number) for rank in range(size)]
            expected, x = in_one_shot(inputs, op, layout), inputs[me].copy()
            assert_same(comm.reduce_scatter(x, op, counts=rows), expected[share(rows, me)], what)
            result = comm.reduce(x.copy(), op, root)
            if me == root:
                assert_same(result, expected, what)
            assert_same(comm.all_reduce(x, op, np.empty_like(x)), expected, what)
            assert_same(comm.all_reduce(x, op), expected, what)
            assert comm._transport.path()[0] == "one-shot"


@all_layouts
def test_small_sums_are_rounded_once_for_all_hosts(layout):
    run_on(layout, check_one_shot, layout)


# --- Other dtypes, groups, messages -----------------------------------------------------------------------------------


def check_every_dtype(comm):
    for dtype in DTYPES:
        for count in (5, 5000):
            inputs = [filled(rank, count, dtype) for rank in range(comm.size)]
            assert_same(comm.all_gather(inputs[comm.rank]), np.stack(inputs), dtype)
            assert_same(comm.broadcast(inputs[comm.rank].copy(), 1), inputs[1], dtype)


@layouts
def test_every_dtype_is_moved(layout):
    run_on(layout, check_every_dtype)


def check_groups(comm):
    """Call in groups of pairs, of even and odd ranks, of all ranks in reverse, of one rank, and in groups of those."""
    for color in (comm.rank // 2, comm.rank % 2, 0, comm.rank, 0 if comm.rank else None):
        group = comm.split(color, key=-comm.rank)
        if group is None:
            continue
        for count in (3, 30_000):
            check_integers(group, "all_reduce", count)
            check_integers(group, "all_to_all", count)
            works = [group.all_reduce(np.full(count, group.rank + 1.0), async_op=True) for _ in range(5)]
            assert all((work.wait() == group.size * (group.size + 1) / 2).all() for work in works)
        with group.split(0) as inner:
            check_integers(inner, "all_gather", 3000)
        group.close()


@layouts
def test_groups_across_hosts(layout):
    run_on(layout, check_groups)


def split_in_threads(comm):
    """Two threads of each rank split and use two communicators at the same time."""
    parents = comm.split(0), comm.split(0)

    def use(parent):
        for turn in range(20):
            with parent.split(0) as group:
                x = group.all_gather(np.array([turn, parents.index(parent)]))
                assert (x == [turn, parents.index(parent)]).all()
        parent.barrier()

    run_threads(use, parents)


@pytest.mark.parametrize("layout", ["01", "0011"])
def test_communicators_are_split_by_two_threads_at_once(layout):
    run_on(layout, split_in_threads)


def exchange_large(comm):
    """Messages around the length from which on the receiver pulls them, and of several pulls."""
    peer = 1 - comm.rank
    for salt, length in enumerate(((64 << 10) - 1, 64 << 10, (64 << 10) + 1, (1 << 20) + 1, (4 << 20) + 1, 9 << 20)):
        y = np.empty(length, np.uint8)
        comm.sendrecv(messages.message(comm.rank, length, salt), peer, y, peer)
        assert_same(y, messages.message(peer, length, salt), f"{length} bytes")


@pytest.mark.parametrize(
    ("fn", "layout"),
    [
        *((messages.lengths, layout) for layout in ("01", "012", "0011")),
        (messages.ordered, "0011"),
        (messages.receives_first, "010"),
        *((fn, "01") for fn in (messages.both_send_first, messages.many_pending, messages.in_threads, exchange_large)),
        *((messages.beside_collectives, layout) for layout in ("0011", "010", "012")),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_messages_between_hosts(fn, layout):
    run_on(layout, fn)
