"""The plugin of pytest, in a pytest of its own: which tests pass, and what is shown of the others."""

import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from harness.failures import until

pytestmark = pytest.mark.slow

TESTS = """
    import os
    import numpy as np
    import pytest

    @pytest.fixture
    def three():
        return 3

    @pytest.mark.ranks(2)
    def test_passes(comm, three, tmp_path):
        assert comm.all_reduce(np.array(comm.rank + 1)) == three
        assert tmp_path.exists()

    @pytest.mark.ranks(1, 2)
    @pytest.mark.parametrize("value", ["a", "b"])
    class TestOfAClass:
        def test_passes(self, comm, value):
            assert comm.broadcast_object(value) == value

    @pytest.mark.ranks(2, env={"MINE": "1"})
    def test_variables(comm):
        assert os.environ["MINE"] == "1"

    @pytest.mark.ranks(2)
    def test_skips(comm):
        pytest.skip("not today")

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(raises=ZeroDivisionError)
    def test_fails_as_expected(comm):
        1 / 0

    @pytest.mark.ranks(3)
    def test_fails(comm):
        print("rank", comm.rank, "of", comm.size)
        values = comm.all_gather_object(comm.rank)
        if comm.rank == 1:
            compare(values)
        comm.barrier()

    def compare(values):
        assert values[1] == 5

    @pytest.mark.ranks(2)
    def test_passes_after_a_failure(comm):
        comm.barrier()
"""
OUTCOMES = {
    "test_passes": ["PASSED"],
    "TestOfAClass::test_passes": ["PASSED"] * 4,
    "test_variables": ["PASSED"],
    "test_skips": ["SKIPPED"],
    "test_fails_as_expected": ["XFAIL"],
    "test_fails": ["FAILED"],
    "test_passes_after_a_failure": ["PASSED"],
}


def run_pytest(folder, *options):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=40)


@pytest.fixture(scope="module", params=[(), ("-n", "2"), ("--import-mode=importlib",)], ids=str)
def ended(request, tmp_path_factory):
    """The pytest that has run TESTS."""
    folder = tmp_path_factory.mktemp("tests")
    (folder / "test_it.py").write_text(textwrap.dedent(TESTS))
    return run_pytest(folder, *request.param)


def outcomes(lines):
    """Return the outcomes by the name of the test, without its parameters."""
    found = {}
    for line in lines:
        name, outcome = re.search(r"::(.+?)\[", line), re.search("PASSED|FAILED|SKIPPED|XFAIL", line)
        if name and outcome:
            found.setdefault(name[1], []).append(outcome[0])
    return found


def test_a_test_has_the_outcome_of_its_ranks(ended):
    lines = ended.stdout.partition("= FAILURES =")[0].splitlines()
    assert outcomes(lines) == OUTCOMES, ended.stdout
    assert ended.returncode == 1


def test_a_failure_is_shown_once_with_the_values_of_its_rank(ended):
    text = ended.stdout
    assert text.count("assert values[1] == 5") == 1
    assert "E       assert 1 == 5\n" in text
    assert "on rank 1 of 3" in text
    assert "FAILED test_it.py::test_fails[3 processes] - assert 1 == 5" in text
    assert {f"rank {rank} of 3" for rank in range(3)} <= {*text.splitlines()}
    assert not re.search("Aborted|PeerLost|marked.py|ranks.py", text)


def test_ranks_are_what_the_option_or_the_mark_says(tmp_path):
    text = """
        import pytest

        @pytest.mark.ranks(2)
        def test_any(comm):
            assert comm.size == 2

        @pytest.mark.ranks(2, world="processes")
        def test_processes(comm):
            assert comm.size == 2
    """
    (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
    for option, worlds in (("threads", ["threads"]), ("both", ["processes", "threads"])):
        ended = run_pytest(tmp_path, "--ranks-world", option)
        found = re.findall(r"::(\w+)\[2 (\w+)\] PASSED", ended.stdout)
        assert found == [*(("test_any", world) for world in worlds), ("test_processes", "processes")]


REFUSED = [  # mark, arguments of the test, what pytest says
    ("ranks(0)", "comm", "the mark ranks: size: expected 1 to 1024 ranks, got 0"),
    ("ranks()", "comm", "the mark ranks: sizes: expected at least one number of ranks, got none"),
    ("ranks(2, world='fork')", "comm", "the mark ranks: unknown world 'fork'; known: processes, threads"),
    ("ranks(2, threads=True)", "comm", "the mark ranks: ranks() got an unexpected keyword argument 'threads'"),
    ("ranks(2, world='threads', env={'A': '1'})", "comm", "env: expected none with threads"),
    ("ranks(2)", "", "arguments: expected comm among them, the communicator of the rank, got test_it"),
    ("slow", "comm", "comm: expected a test that is marked with ranks, as @pytest.mark.ranks(4)"),
    ("ranks(2)", "comm, capsys", "argument capsys: expected an object that can be pickled, got "),
]


def test_what_cannot_run_is_refused_in_a_sentence(tmp_path):
    for number, (mark, arguments, _) in enumerate(REFUSED):
        text = f"import pytest\n@pytest.mark.{mark}\ndef test_it({arguments}): pass\n"
        (tmp_path / f"test_{number}.py").write_text(text)
    (tmp_path / "test_coroutine.py").write_text("import pytest\n@pytest.mark.ranks(2)\nasync def test_it(comm): pass\n")
    ended = run_pytest(tmp_path, "--continue-on-collection-errors")
    words = [*(words for _, _, words in REFUSED), "test: expected a function, not a coroutine, got test_it"]
    assert [each for each in words if each not in ended.stdout] == [], ended.stdout
    assert not re.search("Traceback|ringcomm/testing", ended.stdout)
    assert ended.returncode == 1


def test_an_interrupt_ends_the_ranks(tmp_path):
    text = f"""
        import os, pathlib, pytest, time

        @pytest.mark.ranks(2)
        def test_hangs(comm):
            pathlib.Path({str(tmp_path)!r}, f"pid{{comm.rank}}").write_text(str(os.getpid()))
            time.sleep(60)
    """
    (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        until(lambda: all(file.exists() and file.read_text() for file in files), "the ranks run")
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == pytest.ExitCode.INTERRUPTED
    until(lambda: not any(os.path.exists(f"/proc/{file.read_text()}") for file in files), "the ranks end")
