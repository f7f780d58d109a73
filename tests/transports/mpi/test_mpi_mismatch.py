"""Mismatches between hosts are reported as on one host."""

import numpy as np
import pytest
from test_mismatch import CASES, differ, differ_in_a_pair, differ_in_the_same_sum_of_counts

from harness import mpi_world
from harness.failures import check_usable, mismatch_of, raised
from ringcomm import MismatchError

pytestmark = pytest.mark.mpi

LAYOUTS = [("openmpi", "0123"), ("mpich", "0011"), ("openmpi", "0001"), ("mpich", "0101")]
worlds = pytest.mark.parametrize(("library", "layout"), mpi_world.worlds(*LAYOUTS))


@worlds
@mpi_world.on()
def test_a_mismatch_names_the_call_of_every_rank_and_changes_nothing(comm):
    """Each rank differs once; then ranks on different hosts disagree in pairs."""
    for number, name in enumerate(CASES):
        differ(comm, name, (1, 5001)[number % 2], number % comm.size, async_op=number % 3 == 0)


@worlds
def test_counts_that_differ_are_named_on_every_rank(library, layout):
    mpi_world.run(differ_in_a_pair, layout, 5001, library=library)
    mpi_world.run(differ_in_the_same_sum_of_counts, "012" if layout != "0001" else "001", library=library)


def facts(error):
    return str(error), error.rank, error.peer, error.collective, error.epoch, error.expected, error.got


def raise_all_mismatches(comm):
    """Return the errors that this rank raises for every kind of mismatch."""
    odd = comm.rank == 1
    x = np.zeros((9, 5), np.float32)
    sent = [3, 1, 0, 0] if comm.rank == 2 else [1, 1, 1, 1]
    calls = [
        *[lambda case=case: (case.other if odd else case.usual)(comm, x) for case in CASES.values()],
        lambda: comm.all_to_all(x[:4], send_counts=sent, recv_counts=[1, 1, 1, 1]),
        comm.barrier if odd else lambda: comm.split(0),
    ]
    errors = [mismatch_of(comm, call) for call in calls]
    if comm.rank == 0:
        comm.send(x[0], 3, tag=7)
    elif comm.rank == 3:
        errors.append(raised(MismatchError, lambda: comm.recv(np.zeros(5, np.int32), 0, tag=7)))
    check_usable(comm)
    return [facts(error) for error in errors]


@pytest.mark.parametrize("layout", ["0123", "0011", "0001"])
def test_a_mismatch_is_reported_as_on_one_host(layout):
    on_one_host = mpi_world.run(raise_all_mismatches, "0000")
    for rank, errors in enumerate(mpi_world.run(raise_all_mismatches, layout)):
        assert errors == on_one_host[rank]
