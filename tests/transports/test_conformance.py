"""Every transport keeps the contract. The test finds the transports of ringcomm.transports by itself."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import harness
from harness import mpi_world
from harness.mpi_world import LIBRARIES
from ringcomm import Communicator, transports
from ringcomm.adapters import ADAPTERS, EmulatedAdapter
from ringcomm.devices import emulated
from ringcomm.testing import (
    CHECKS,
    a_mismatch_is_named_on_every_rank,
    check_rank,
    connect_threads,
    run_threads,
)
from ringcomm.transports.choice import find_transports
from ringcomm.transports.contract import NO_FAST_PATH

FOUND = find_transports()
WITH_A_STORE = [name for name, module in FOUND.items() if module.NEEDS_STORE]
UNDER_MPI = [name for name, module in FOUND.items() if not module.NEEDS_STORE]
BUILDING_BLOCKS = {"core", "routing"}  # of transports: tested with those that they are part of
USUAL = [(library, layout) for library in LIBRARIES for layout in ("0123", "0011", "0001")]

checks = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


def test_every_transport_is_found():
    folder = Path(transports.__file__).parent
    defining = (path for path in folder.rglob("*.py") if re.search(r"^class \w+Transport\b", path.read_text(), re.M))
    names = {path.relative_to(folder).parts[0].removesuffix(".py") for path in defining}
    assert names - {"contract"} | {"mpi"} == {*FOUND} | BUILDING_BLOCKS  # mpi has the transport of network


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@checks
@pytest.mark.parametrize("transport", WITH_A_STORE)
def test_ranks_that_are_threads_keep_the_contract(transport, check, size):
    run_threads(check, [Communicator(end) for end in connect_threads(FOUND[transport].connect, size)])


def check_in_group(comm, name):
    check = next(check for check in CHECKS if check.__name__ == name)
    with comm.split(0, key=-comm.rank) as group:
        check(group)
    comm.barrier()  # also if the check has broken its group


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_a_group_of_processes_keeps_the_contract(name, size):
    harness.run(check_in_group, size, name)


@pytest.mark.parametrize("size", [1, 2, 3])
@checks
@pytest.mark.parametrize("transport", WITH_A_STORE)
def test_a_group_of_emulated_gpus_keeps_the_contract(transport, check, size, monkeypatch):
    if check is a_mismatch_is_named_on_every_rank:
        pytest.skip("one of its mismatches is between a barrier of the host and a kernel: both time out")
    monkeypatch.setitem(ADAPTERS, np.ndarray, EmulatedAdapter(emulated))  # the device accesses NumPy's arrays
    ends = connect_threads(FOUND[transport].connect, size)
    for end in ends:
        end.fast_path = NO_FAST_PATH
    run_threads(check, [Communicator(end) for end in ends])


def check_over_mpi(comm):
    check_rank(lambda: comm.split(0))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("library", "layout"),
    [*mpi_world.worlds(("openmpi", "01"), *USUAL, ("mpich", "0101")), ("openmpi", "0000"), ("mpich", "0000")],
)
@pytest.mark.parametrize("transport", UNDER_MPI)
def test_ranks_under_mpi_keep_the_contract(transport, library, layout):
    mpi_world.run(check_over_mpi, layout, library=library, transport=transport)


def hosts_of(layout, link):
    """Return a function that connects the ranks of a layout such as "001", as if each digit were a host."""

    def connect(rank, size, store, config):
        return FOUND["network"].connect(rank, size, store, replace(config, host_id=layout[rank], link=link))

    return connect


@pytest.mark.parametrize(
    ("link", "layout"),
    [*(("sockets", layout) for layout in ("01", "001", "0101", "0123", "01012")), ("ucx", "01"), ("ucx", "0101")],
)
@checks
def test_ranks_on_several_hosts_keep_the_contract(check, link, layout):
    run_threads(check, [Communicator(end) for end in connect_threads(hosts_of(layout, link), len(layout))])
