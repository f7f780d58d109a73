"""What communicators, messages, requests and collectives of ringcomm.mpi4py return is what Open MPI returns."""

import difflib
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import harness
import mpi_world

PROGRAM = str(Path(__file__).with_name("communication.py"))
RINGCOMM = [sys.executable, "-m", "ringcomm", "run", "--mpi4py", "-n"]

pytestmark = pytest.mark.slow


def on_ringcomm(size, *program):
    done = subprocess.run(
        [*RINGCOMM, str(size), *program], capture_output=True, text=True, timeout=2 * harness.OPERATION
    )
    assert done.returncode == 0, done.stderr
    return re.sub(r"^\[0\] ?", "", done.stdout, flags=re.MULTILINE)


@functools.cache
def on_open_mpi(size):
    mpi_world.skip_without("openmpi")
    process = mpi_world.start("openmpi", size)(subprocess.PIPE, PROGRAM)
    printed = process.communicate(timeout=2 * harness.OPERATION)[0].decode()
    assert process.returncode == 0, printed
    return printed


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_call_returns_what_open_mpi_returns(size):
    expected, got = on_open_mpi(size), on_ringcomm(size, PROGRAM)
    assert not list(difflib.unified_diff(expected.splitlines(), got.splitlines(), lineterm=""))
