"""The mpi4py programs in examples/ print the same on ringcomm as on Open MPI, on any number of ranks."""

import functools
import re
import subprocess
import sys

import pytest

import harness
import mpi_world
from training import EXAMPLES

RINGCOMM = [sys.executable, "-m", "ringcomm", "run", "--mpi4py", "-n"]
PROGRAMS = {
    "mpi4py_heat.py": ["--cells", "30", "--steps", "40"],
    "mpi4py_kmeans.py": ["--points", "500", "--clusters", "4"],
    "mpi4py_sweep.py": ["--runs", "20"],
}

pytestmark = pytest.mark.slow


def on_ringcomm(name, size):
    done = subprocess.run([*RINGCOMM, str(size), *arguments(name)], capture_output=True, text=True, timeout=deadline())
    assert done.returncode == 0, done.stderr
    return re.sub(r"^\[0\] ", "", done.stdout, flags=re.MULTILINE)


@functools.cache
def on_open_mpi(name):
    mpi_world.skip_without("openmpi")
    begin = mpi_world.start("openmpi", 2)
    process = begin(subprocess.PIPE, *arguments(name))
    printed = process.communicate(timeout=deadline())[0].decode()
    assert process.returncode == 0, printed
    return printed


def arguments(name):
    module = ["-m", "mpi4py.futures"] if "MPIPoolExecutor" in (EXAMPLES / name).read_text() else []
    return [*module, str(EXAMPLES / name), *PROGRAMS[name]]


def deadline():
    return 2 * harness.OPERATION


def test_every_program_is_tested():
    assert {path.name for path in EXAMPLES.glob("mpi4py_*.py")} == {*PROGRAMS}


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_the_same_on_ringcomm_as_on_open_mpi(name, size):
    printed = on_ringcomm(name, size)
    assert printed == on_open_mpi(name)
    assert printed.count("\n") >= 4


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_mentions_nothing_of_ringcomm(name):
    text = (EXAMPLES / name).read_text()
    assert "import ringcomm" not in text
    assert text.count("\n") < 100
