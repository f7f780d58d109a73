"""How tests run a program of mpi4py on ranks of its own."""

import pytest

from harness.jobs import run_job


@pytest.fixture
def run_program(tmp_path):
    """Return a function that runs a program of mpi4py on some ranks, and returns the ended process."""

    def run(size, text, *options, **expected):
        return run_job(tmp_path, size, text, options=("--mpi4py", *options), **expected)

    return run
