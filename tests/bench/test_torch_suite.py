"""benchmarks/torch_suite.py: every test has an outcome, also beside tests that crash or hang, and differences show."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import harness

pytestmark = pytest.mark.slow

SUITE = Path(__file__).parents[2] / "benchmarks/torch_suite.py"
SMALL = """
    import os
    import signal

    import torch
    import torch.distributed as dist

    def sum_of_ranks(rank, path, word):
        dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
        tensor = torch.tensor(rank + 1)
        dist.all_reduce(tensor)
        assert tensor == 3
        backend = dist.get_backend()
        dist.destroy_process_group()
        assert os.environ["PLAYED"] == word
        assert backend == os.environ["SUITE_BACKEND"]

    def test_ranks(tmp_path, monkeypatch):
        for word in ("one", "two"):
            monkeypatch.setenv("PLAYED", word)
            torch.multiprocessing.spawn(sum_of_ranks, (str(tmp_path / word), word), nprocs=2)

    def test_crash():
        os.kill(os.getpid(), signal.SIGKILL)

    def test_name():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        backend = dist.get_backend()
        dist.destroy_process_group()
        if backend != "gloo":
            raise AssertionError("the name of Gloo")
"""
HANGING = """
    import os
    import threading

    def test_hang():
        if os.environ["SUITE_BACKEND"] == "ringcomm":
            threading.Event().wait()

    def test_behind_it():
        raise AssertionError("on both")
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that runs the suite on files, where the packages that PyTorch's tests need are there."""
    packages = tmp_path / "packages"
    packages.mkdir()

    for name in ("expecttest", "hypothesis"):
        (packages / f"{name}.py").touch()

    def call(files, *options):
        for name, text in files.items():
            (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tests" / name).write_text(dedent(text))
        return subprocess.run(
            [sys.executable, SUITE, tmp_path / "tests", *options],
            env=os.environ | {"PYTHONPATH": str(packages)},
            capture_output=True,
            text=True,
            timeout=harness.JOB,
            check=False,
        )

    return call


def test_tests_that_crash_are_not_finished_and_a_test_that_passes_on_gloo_alone_is_shown(run):
    done = run(
        {"folder/test_small.py": SMALL, "test_left_out.py": "import sys\nsys.exit(0)"}, "folder", "test_left_out.py"
    )
    assert done.stderr.splitlines() == [
        "test_small.py: 2 passed, 1 not finished on Gloo; 1 passed, 1 failed, 1 not finished on ringcomm, 1 in a group",
        "    test_name: passed on Gloo, failed on ringcomm: AssertionError: the name of Gloo",
        "test_left_out.py: 1 skipped on Gloo; 1 skipped on ringcomm, 0 in a group",
    ]
    assert done.stdout.splitlines()[2:] == [
        "| `folder` | 1 | 2 passed, 1 not finished | 1 passed, 1 failed, 1 not finished | 1 | 1 |",
        "| `test_left_out.py` | 1 | 1 skipped | 1 skipped | 0 | 0 |",
    ]
    assert done.returncode == 1


def test_a_test_that_hangs_is_not_finished_and_the_next_ones_run(run):
    done = run({"test_hanging.py": HANGING}, "test_hanging.py", "--timeout", "10")
    assert done.stderr.splitlines()[0] == (
        "test_hanging.py: 1 passed, 1 failed on Gloo; 1 failed, 1 not finished on ringcomm, 0 in a group"
    )
    assert done.returncode == 1


def test_tests_that_fail_on_both_are_no_difference(run):
    done = run({"test_hanging.py": HANGING}, "-k", "behind")
    assert done.stdout.splitlines()[2:] == ["| `.` | 1 | 1 failed | 1 failed | 0 | 0 |"]
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        (("json",), "no test_*.py at {}: expected PyTorch's folder test/distributed"),
        (
            ("json", "expecttest_", "hypothesis_"),
            "has no expecttest_, hypothesis_: pip install expecttest_ hypothesis_",
        ),
    ],
)
def test_a_folder_without_tests_and_missing_packages_are_named(needed, said, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SUITE.parent)
    suite = importlib.import_module("torch_suite")
    monkeypatch.setattr(suite, "NEEDED", needed)
    monkeypatch.setattr(sys, "argv", ["torch_suite.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        suite.main()
    assert said.format(tmp_path) in capsys.readouterr().err
