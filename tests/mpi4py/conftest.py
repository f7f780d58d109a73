"""How tests run a program of mpi4py on ranks of its own."""

import os
import subprocess
import sys
import textwrap

import pytest

RUN = [sys.executable, "-m", "ringcomm", "run", "--mpi4py", "-n"]


@pytest.fixture
def run_program(tmp_path):
    """Return a function that runs a program of mpi4py on some ranks, and returns the ended process."""

    def run(size, text, *options, status=0, **environment):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(text))
        command = [*RUN, str(size), *options, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, env={**os.environ, **environment})
        assert done.returncode == status, done.stderr
        return done

    return run
