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
    def test_fails_as_it_says(comm):
        pytest.xfail("not yet")

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(raises=ZeroDivisionError)
    def test_fails_as_expected(comm):
        1 / 0

    @pytest.mark.ranks(3)
    def test_fails(comm):
        print(f"rank {comm.rank} of {comm.size}\\n", end="")  # at once: threads print beside each other
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
    "test_fails_as_it_says": ["XFAIL"],
    "test_fails_as_expected": ["XFAIL"],
    "test_fails": ["FAILED"],
    "test_passes_after_a_failure": ["PASSED"],
}


def run_pytest(folder, *options):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=40)


@pytest.fixture(scope="module", params=[(), ("-n", "2"), ("--ranks-world=threads",)], ids=str)
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
    assert re.search(r"FAILED test_it.py::test_fails\[3 \w+\] - assert 1 == 5", text)
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
    (
        "ranks(2)",
        "comm, monkeypatch",
        "argument monkeypatch: expected an object that can be pickled, got a MonkeyPatch",
    ),
    ("ranks(2, env={'A': 1})", "comm", "env: expected names and values that are strings, got {'A': 1}"),
    ("ranks(2, env={'RINGCOMM_KERNELS': 'none'})", "comm", "unknown value of RINGCOMM_KERNELS 'none'; known: "),
]


def test_what_cannot_run_is_refused_in_a_sentence(tmp_path):
    for number, (mark, arguments, _) in enumerate(REFUSED):
        text = f"import pytest\n@pytest.mark.{mark}\ndef test_it({arguments}): pass\n"
        (tmp_path / f"test_{number}.py").write_text(text)
    case = "import unittest\nclass Case(unittest.TestCase):\n    @pytest.mark.ranks(2)\n    def test_it(self): pass\n"
    (tmp_path / "test_case.py").write_text(f"import pytest\n{case}")
    (tmp_path / "test_coroutine.py").write_text("import pytest\n@pytest.mark.ranks(2)\nasync def test_it(comm): pass\n")
    ended = run_pytest(tmp_path, "--continue-on-collection-errors")
    words = [*(words for _, _, words in REFUSED), "test: expected a function, not a coroutine, got test_it"]
    words += ["the mark ranks: expected a function or a method of a plain class"]
    assert [each for each in words if each not in ended.stdout] == [], ended.stdout
    assert not re.search("Traceback|/ringcomm/", ended.stdout)
    assert ended.returncode == 1


def test_packages_that_only_pytest_finds_are_found_on_ranks(tmp_path):
    (tmp_path / "unit" / "deep").mkdir(parents=True)
    for folder in ("unit", "unit/deep"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "unit" / "helper.py").write_text("SIZE = 2\n")
    text = (
        "import pytest\nfrom ..helper import SIZE\n@pytest.mark.ranks(2)\ndef test_it(comm): assert comm.size == SIZE\n"
    )
    (tmp_path / "unit" / "deep" / "test_it.py").write_text(text)
    ended = run_pytest(tmp_path, "--import-mode=importlib")
    assert "1 passed" in ended.stdout, ended.stdout


def test_ranks_that_do_not_agree_to_skip_fail(tmp_path):
    text = "import pytest\n@pytest.mark.ranks(2)\ndef test_it(comm):\n    if comm.rank: pytest.skip('odd')\n"
    (tmp_path / "test_it.py").write_text(text)
    ended = run_pytest(tmp_path, "--ranks-world=both")
    assert ended.stdout.count("\nrank 1 has called pytest.skip('odd'), others have not\n") == 2, ended.stdout


def test_tests_run_also_on_a_rank_of_a_job(tmp_path):
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.ranks(2)\ndef test_it(comm): comm.barrier()\n")
    command = [
        sys.executable,
        "-m",
        "ringcomm",
        "run",
        "-n",
        "1",
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "test_it.py",
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=40)
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_pytest(tmp_path, number):
    text = f"""
        import os, pathlib, pytest, time

        @pytest.mark.ranks(2)
        def test_hangs(comm):
            pathlib.Path({str(tmp_path)!r}, f"pid{{comm.rank}}").write_text(str(os.getpid()))
            while True:
                time.sleep(1)
    """
    (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        until(lambda: all(file.exists() and file.read_text() for file in files), "the ranks run")
        running.send_signal(number)
        assert running.wait(20) == (pytest.ExitCode.INTERRUPTED if number == signal.SIGINT else -signal.SIGKILL)
    until(lambda: not any(os.path.exists(f"/proc/{file.read_text()}") for file in files), "the ranks end")
