"""Results under MPI, bit for bit: moved and exact data as on every transport, rounded sums as their schedules define.

Between hosts an algorithm decides in which order a sum is made. So it is compared with the recorded schedule, evaluated
in NumPy; inside a host the sum is made in rank order before that.
"""

from unittest.mock import patch

import numpy as np
import pytest

from cases.between_hosts import ROUNDED, SIGNED, algorithms, check_exact, check_rounded, hosts_of
from cases.collectives import PLANS
from harness import mpi_world
from ringcomm.algorithms import ALGORITHMS
from ringcomm.algorithms.schedule import Exchange
from ringcomm.transports.network import transport
from ringcomm.types import REDUCING, WHOLE

pytestmark = pytest.mark.mpi

SEGMENT = 4096  # bytes of a block: more than one packet holds of all hosts
USUAL = [("mpich", "012"), ("openmpi", "0123"), ("mpich", "0011"), ("openmpi", "0001"), ("mpich", "0101")]


@pytest.mark.parametrize(("library", "layout"), mpi_world.worlds(*USUAL))
def test_moved_and_exact_data_are_the_same_as_on_other_transports(library, layout):
    for name, collectives in algorithms(layout, [*PLANS]):
        mpi_world.run(check_exact, layout, collectives, SEGMENT, library=library, algorithm=name)


# --- Sums that are rounded --------------------------------------------------------------------------------------------


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
