"""How tests run a program of mpi4py on ranks of its own."""

import textwrap

import pytest

from harness.jobs import run_job


@pytest.fixture
def run_program(tmp_path):
    """Return a function that runs a program of mpi4py on some ranks, and returns the ended process."""

    def run(size, text, *options, **expected):
        return run_job(tmp_path, size, text, options=("--mpi4py", *options), **expected)

    return run


@pytest.fixture
def run_on_world(run_program):
    """Return a function that runs a program which has numpy as `np`, `MPI`, and COMM_WORLD as `comm`."""
    start = "import numpy as np\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\n"
    return lambda size, text, *options, **expected: run_program(
        size, start + textwrap.dedent(text), *options, **expected
    )
