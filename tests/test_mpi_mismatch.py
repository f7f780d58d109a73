"""Ranks on several hosts that call different things are told the same as those on one."""

import numpy as np
import pytest

import mpi_world
from failures import check_usable, raised
from ringcomm import MismatchError
from test_mismatch import CASES, differ, differ_in_a_pair, differ_in_the_same_sum_of_counts

pytestmark = pytest.mark.mpi

LAYOUTS = [("openmpi", "0123"), ("mpich", "0011"), ("openmpi", "0001"), ("mpich", "0101")]
worlds = pytest.mark.parametrize(("library", "layout"), mpi_world.worlds(*LAYOUTS))


def differ_in_all_ways(comm):
    """Each rank is once the odd one; then ranks that one host cannot see disagree in pairs."""
    for number, name in enumerate(CASES):
        differ(comm, name, (1, 5001)[number % 2], number % comm.size, async_op=number % 3 == 0)


@worlds
def test_a_mismatch_names_the_call_of_every_rank_and_changes_nothing(library, layout):
    mpi_world.run(differ_in_all_ways, layout, library=library)


@worlds
def test_counts_that_differ_are_named_on_every_rank(library, layout):
    mpi_world.run(differ_in_a_pair, layout, 5001, library=library)
    mpi_world.run(differ_in_the_same_sum_of_counts, "012" if layout != "0001" else "001", library=library)


def facts(error):
    return str(error), error.rank, error.peer, error.collective, error.epoch, error.expected, error.got


def tell_all_differences(comm):
    """Return what this rank is told of everything that can differ."""
    odd = comm.rank == 1
    x = np.zeros((9, 5), np.float32)
    sent = [3, 1, 0, 0] if comm.rank == 2 else [1, 1, 1, 1]
    calls = [
        *[lambda case=case: (case.other if odd else case.usual)(comm, x) for case in CASES.values()],
        lambda: comm.all_to_all(x[:4], send_counts=sent, recv_counts=[1, 1, 1, 1]),
        comm.barrier if odd else lambda: comm.split(0),
    ]
    told = [raised(MismatchError, call) for call in calls]
    if comm.rank == 0:
        comm.send(x[0], 3, tag=7)
    elif comm.rank == 3:
        told.append(raised(MismatchError, lambda: comm.recv(np.zeros(5, np.int32), 0, tag=7)))
    check_usable(comm)
    return [facts(error) for error in told]


@pytest.mark.parametrize("layout", ["0123", "0011", "0001"])
def test_a_mismatch_is_told_as_on_one_host(layout):
    on_one_host = mpi_world.run(tell_all_differences, "0000")
    for rank, told in enumerate(mpi_world.run(tell_all_differences, layout)):
        assert told == on_one_host[rank]
