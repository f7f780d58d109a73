"""Every transport keeps the contract. The test finds the transports of ringcomm.transports by itself."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import harness
from cases.no_fast_path import NO_FAST_PATH
from harness import mpi_world
from harness.mpi_world import LIBRARIES
from ringcomm import transports
from ringcomm.arrays.adapters import ADAPTERS, EmulatedAdapter
from ringcomm.communicator import Communicator
from ringcomm.devices import emulated
from ringcomm.testing import check_rank, check_transport, connect_threads, run_threads
from ringcomm.testing.conformance import CHECKS, a_mismatch_is_named_on_every_rank
from ringcomm.transports.choice import find_transports
from ringcomm.transports.staged import staging

FOUND = find_transports()
WITH_A_STORE = [name for name, module in FOUND.items() if module.NEEDS_STORE]
UNDER_MPI = [name for name, module in FOUND.items() if not module.NEEDS_STORE]
USUAL = [(library, layout) for library in LIBRARIES for layout in ("0123", "0011", "0001")]


def test_every_transport_is_found():
    folder = Path(transports.__file__).parent
    defining = (path for path in folder.rglob("*.py") if re.search(r"^class \w+Transport\b", path.read_text(), re.M))
    names = {path.relative_to(folder).parts[0].removesuffix(".py") for path in defining}
    assert names - {"contract"} | {"mpi"} == {*FOUND}  # mpi has the transport of network


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", WITH_A_STORE)
def test_ranks_that_are_threads_keep_the_contract(transport, size):
    check_transport(partial(connect_threads, FOUND[transport].connect), [size])


def check_in_groups(comm):
    check_rank(lambda: comm.split(0, key=-comm.rank))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_groups_of_processes_keep_the_contract(size):
    harness.run(check_in_groups, size)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("library", "layout"),
    [*mpi_world.worlds(("openmpi", "01"), *USUAL, ("mpich", "0101")), ("openmpi", "0000"), ("mpich", "0000")],
)
@pytest.mark.parametrize("transport", UNDER_MPI)
def test_ranks_under_mpi_keep_the_contract(transport, library, layout):
    mpi_world.run(check_in_groups, layout, library=library, transport=transport)


def hosts_of(layout, link):
    """Return a function that connects the ranks of a layout such as "001", as if each digit were a host."""

    def connect(rank, size, store, config):
        return FOUND["network"].connect(rank, size, store, replace(config, host_id=layout[rank], link=link))

    return connect


@pytest.mark.parametrize(
    ("link", "layout"), [*(("sockets", layout) for layout in ("01", "001", "0101", "0123", "01012")), ("ucx", "01")]
)
def test_ranks_on_several_hosts_keep_the_contract(link, layout):
    check_transport(partial(connect_threads, hosts_of(layout, link)), [len(layout)])


def test_groups_of_ranks_on_several_hosts_keep_the_contract_over_ucx():
    """Connect once: UCX needs half a second for every four ranks."""
    run_threads(check_in_groups, [Communicator(each) for each in connect_threads(hosts_of("0101", "ucx"), 4)])


# --- On GPUs ----------------------------------------------------------------------------------------------------------


def connect_gpus(connect, size):
    ends = connect_threads(connect, size)
    for end in ends:
        end.fast_path = NO_FAST_PATH
    return ends


@pytest.fixture
def arrays_on_gpus(monkeypatch):
    """Let the emulated device access NumPy's arrays."""
    monkeypatch.setitem(ADAPTERS, np.ndarray, EmulatedAdapter(emulated))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("transport", WITH_A_STORE)
@pytest.mark.usefixtures("arrays_on_gpus")
def test_a_group_of_emulated_gpus_keeps_the_contract(transport, size, monkeypatch):
    # One of its mismatches is between a barrier of the host and a kernel: both time out.
    possible = [check for check in CHECKS if check is not a_mismatch_is_named_on_every_rank]
    monkeypatch.setattr("ringcomm.testing.conformance.CHECKS", possible)
    check_transport(partial(connect_gpus, FOUND[transport].connect), [size])


@pytest.mark.parametrize("layout", ["01", "0011"])
@pytest.mark.usefixtures("arrays_on_gpus")
def test_gpus_of_several_hosts_keep_the_contract(layout, monkeypatch):
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1 << 17)  # the largest arrays are staged in ten chunks
    check_transport(partial(connect_gpus, hosts_of(layout, None)), [len(layout)])
