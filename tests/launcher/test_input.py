"""The standard input of `ringcomm run` is that of rank 0: a file, a pipe, or what is typed at a terminal."""

import subprocess
import sys
import textwrap

import pytest

import harness

pytestmark = pytest.mark.slow

RUN = [sys.executable, "-m", "ringcomm", "run", "-n", "2"]
TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
PROGRAM = """
    import os, sys

    print(sys.stdin.readline().strip() or "nothing")
    """


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return str(path)


def printed(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=harness.JOB, **options)
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("["))


def test_rank_0_reads_a_pipe(program):
    assert printed([*RUN, program], input="a line\n") == ["[0] a line", "[1] nothing"]


def test_rank_0_reads_a_file(program, tmp_path):
    (tmp_path / "input").write_text("a line\n")
    with open(tmp_path / "input") as file:
        assert printed([*RUN, program], stdin=file) == ["[0] a line", "[1] nothing"]


def test_rank_0_reads_what_is_typed_at_a_terminal(program):
    command = [sys.executable, "-c", TERMINAL, *RUN, program]
    assert printed(command, input="a line\n") == ["[0] a line", "[1] nothing"]


def test_a_terminal_at_which_nothing_is_typed_keeps_nobody(tmp_path):
    (tmp_path / "silent.py").write_text("print('done')\n")
    command = [sys.executable, "-c", TERMINAL, *RUN, str(tmp_path / "silent.py")]
    assert printed(command, stdin=subprocess.PIPE) == ["[0] done", "[1] done"]
