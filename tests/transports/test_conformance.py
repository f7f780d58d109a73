"""Every transport keeps the contract. The test finds the transports of ringcomm.transports by itself."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import harness
import mpi_world
from mpi_world import LIBRARIES
from ringcomm import Communicator, transports
from ringcomm.adapters import ADAPTERS, EmulatedAdapter
from ringcomm.devices import emulated
from ringcomm.start import find_transports
from ringcomm.testing import (
    CHECKS,
    a_mismatch_is_named_on_every_rank,
    check_rank,
    check_transport,
    connect_threads,
    run_threads,
)
from ringcomm.transports.contract import NO_FAST_PATH

FOUND = find_transports()
WITH_A_STORE = [name for name, module in FOUND.items() if module.NEEDS_STORE]
UNDER_MPI = [name for name, module in FOUND.items() if not module.NEEDS_STORE]
BUILDING_BLOCKS = {"messages", "routing"}  # of transports: tested over Gloo and MPI, and around every transport
USUAL = [(library, layout) for library in LIBRARIES for layout in ("0123", "0011", "0001")]

checks = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


def test_every_transport_is_found():
    folder = Path(transports.__file__).parent
    defining = (path for path in folder.rglob("*.py") if re.search(r"^class \w+Transport\b", path.read_text(), re.M))
    names = {path.relative_to(folder).parts[0].removesuffix(".py") for path in defining}
    assert names - {"contract"} == {*FOUND} | BUILDING_BLOCKS


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


@pytest.mark.slow
def test_messages_over_gloo_keep_the_contract(monkeypatch):
    torch = pytest.importorskip("torch")
    from ringcomm.torch.gloo import connect

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def make_world(size):
        store = torch.distributed.HashStore()
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda rank: connect(rank, size, store, 10.0), range(size)))

    check_transport(make_world)
