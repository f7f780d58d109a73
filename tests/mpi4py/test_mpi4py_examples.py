"""The mpi4py programs in examples/ print the same on ringcomm as on Open MPI, on any number of ranks."""

import functools

import pytest
from mpi_programs import on_open_mpi, on_ringcomm

from cases.training import EXAMPLES

PROGRAMS = {
    "mpi4py_heat.py": ["--cells", "30", "--steps", "40"],
    "mpi4py_kmeans.py": ["--points", "500", "--clusters", "4"],
    "mpi4py_sweep.py": ["--runs", "20"],
}

pytestmark = pytest.mark.slow


def arguments(name):
    module = ["-m", "mpi4py.futures"] if "MPIPoolExecutor" in (EXAMPLES / name).read_text() else []
    return [*module, str(EXAMPLES / name), *PROGRAMS[name]]


@functools.cache
def printed_on_open_mpi(name):
    return on_open_mpi(2, *arguments(name))


def test_every_program_is_tested():
    assert {path.name for path in EXAMPLES.glob("mpi4py_*.py")} == {*PROGRAMS}


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_the_same_on_ringcomm_as_on_open_mpi(name, size):
    printed = on_ringcomm(size, *arguments(name))
    assert printed == printed_on_open_mpi(name)
    assert printed.count("\n") >= 4


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_mentions_nothing_of_ringcomm(name):
    text = (EXAMPLES / name).read_text()
    assert "import ringcomm" not in text
    assert text.count("\n") < 100
