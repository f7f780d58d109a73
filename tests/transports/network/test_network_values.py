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
    on_layouts,
    run_on,
    uneven,
    values,
)
from cases.collectives import PLANS, Case, share, start
from cases.reference import OPS, assert_same, filled, numpy_dtype, reduced
from ringcomm.algorithms.cost import LinkCost
from ringcomm.algorithms.schedule import even
from ringcomm.testing import run_threads
from ringcomm.transports.network import program_recorder
from ringcomm.types import DTYPES, REDUCING, WHOLE, PremulSum

ONE_SHOT, SLOT = 8 << 10, 384  # bytes: of a host with one rank, of each rank of a larger host
PIECE = 256 << 10  # bytes: of a transfer
USUAL = ("01", "0011", "0001", "0123", "010")

layouts = pytest.mark.parametrize("layout", USUAL)


# --- Moved and exact data ---------------------------------------------------------------------------------------------


@layouts
def test_moved_and_exact_data_are_the_same_as_on_other_transports(layout):
    for name, collectives in algorithms(layout, [*PLANS]):
        run_on(layout, check_exact, collectives, 4096, algorithm=name)


def test_moved_and_exact_data_are_the_same_where_ranks_connect_at_first_use():
    run_on("0000111122223333", check_exact, [*PLANS], 4096)


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
    monkeypatch.setattr(program_recorder, "MESSAGE_BYTES", 1000)
    slow = {"algorithm": "ring", "link_bandwidth": 0.1}
    run_on(layout, check_sizes, ["all_reduce", "reduce", "broadcast"], [7992, 8000, 8008, 40_000], **slow)
    calls = [(9001, kind) for kind in ROUNDED]
    run_on(layout, check_rounded, layout, ["all_reduce", "reduce"], "ring", calls, LinkCost(0, 1e-8), **slow)


def in_one_shot(inputs, op, layout):
    """Return the reduction of a small call: inside each host in rank order, then hosts in order, rounded once."""
    if isinstance(op, PremulSum):
        inputs, op = [reduced([x], op) for x in inputs], "sum"
    step = "sum" if op == "avg" else op
    result = reduced([reduced([inputs[rank] for rank in ranks], step) for ranks in hosts_of(layout)], step)
    return average(result, len(inputs)) if op == "avg" else result


@on_layouts(*USUAL, "012", "0101", "0112", "01012")
def test_small_sums_are_rounded_once_for_all_hosts(comm, layout):
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


# --- Other dtypes, groups, messages -----------------------------------------------------------------------------------


@on_layouts(*USUAL)
def test_every_dtype_is_moved(comm):
    for dtype in DTYPES:
        for count in (5, 5000):
            inputs = [filled(rank, count, dtype) for rank in range(comm.size)]
            assert_same(comm.all_gather(inputs[comm.rank]), np.stack(inputs), dtype)
            assert_same(comm.broadcast(inputs[comm.rank].copy(), 1), inputs[1], dtype)


@on_layouts(*USUAL)
def test_groups_across_hosts(comm):
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


@on_layouts("01", "0011")
def test_communicators_are_split_by_two_threads_at_once(comm):
    """Two threads of each rank split and use two communicators at the same time."""
    parents = comm.split(0), comm.split(0)

    def use(parent):
        for turn in range(20):
            with parent.split(0) as group:
                x = group.all_gather(np.array([turn, parents.index(parent)]))
                assert (x == [turn, parents.index(parent)]).all()
        parent.barrier()

    run_threads(use, parents)


@on_layouts("01")
def test_messages_of_one_and_of_several_pulls(comm):
    """Messages around the length from which on the receiver pulls them, and of several pulls."""
    peer = 1 - comm.rank
    for salt, length in enumerate(((64 << 10) - 1, 64 << 10, (64 << 10) + 1, (1 << 20) + 1, (4 << 20) + 1, 9 << 20)):
        y = np.empty(length, np.uint8)
        comm.sendrecv(messages.message(comm.rank, length, salt), peer, y, peer)
        assert_same(y, messages.message(peer, length, salt), f"{length} bytes")


MESSAGES = {
    messages.test_messages_of_every_length_go_around_a_ring: ("01", "012", "0011"),
    messages.test_messages_keep_their_order_per_peer_and_tag: ("0011",),
    messages.test_receives_may_be_posted_before_anything_is_sent: ("010",),
    messages.test_many_messages_may_be_pending: ("01",),
    messages.test_threads_of_a_rank_send_and_receive_concurrently: ("01",),
    messages.test_messages_run_beside_collectives: ("0011", "010", "012"),
}


@pytest.mark.parametrize(("test", "layout"), [(test, layout) for test in MESSAGES for layout in MESSAGES[test]])
def test_messages_between_hosts(test, layout):
    run_on(layout, test)
