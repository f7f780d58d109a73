"""The cores on which `ringcomm run` places ranks."""

import functools
import os
import subprocess
import sys

import pytest

from ringcomm.machine import topology

pytestmark = pytest.mark.slow

CORES = os.sched_getaffinity(0)
RUN = [sys.executable, "-m", "ringcomm", "run"]


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "cores.py"
    path.write_text("import os\nprint(*sorted(os.sched_getaffinity(0)))\n")
    return str(path)


def run(*words, on=CORES):
    bind = functools.partial(os.sched_setaffinity, 0, on)
    return subprocess.run([*RUN, *words], preexec_fn=bind, capture_output=True, text=True, timeout=30)


def cores_of_ranks(done):
    assert done.returncode == 0, done.stderr
    return [{int(core) for core in line.split()[1:]} for line in sorted(done.stdout.splitlines())]


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("options", [[], ["--bind", "core"]])
def test_each_rank_has_cores_of_its_own_where_there_are_enough(program, options):
    done = run(*options, "-v", "-n", "2", program)
    first, second = cores_of_ranks(done)
    assert first
    assert second
    assert not first & second
    assert first | second == CORES
    said = [
        f"ringcomm INFO: rank {i} runs on the cores {', '.join(map(str, sorted(mine)))}"
        for i, mine in ((0, first), (1, second))
    ]
    assert done.stderr.splitlines() == said


def test_with_bind_none_ranks_run_on_all_cores(program):
    assert cores_of_ranks(run("--bind", "none", "-n", "2", program)) == [CORES, CORES]


def test_the_mask_of_the_user_is_obeyed_also_if_it_has_fewer_cores_than_ranks(program):
    one = {max(CORES)}
    assert cores_of_ranks(run("-n", "1", program, on=one)) == [one]
    done = run("-v", "-n", "2", program, on=one)
    assert cores_of_ranks(done) == [one, one]
    assert done.stderr.startswith("ringcomm INFO: 2 ranks are not bound to cores (1 by affinity, ")


def test_to_bind_more_ranks_than_cores_is_refused_with_the_figures(program):
    done = run("--bind", "core", "-n", "2", program, on={min(CORES)})
    assert (done.returncode, done.stdout) == (2, "")
    assert "--bind core: expected at most as many ranks as cores (1 by affinity, " in done.stderr
    assert done.stderr.endswith("got 2 ranks\n")


@pytest.fixture
def threads(tmp_path):
    path = tmp_path / "threads.py"
    path.write_text("import os\nprint(os.environ.get('OMP_NUM_THREADS'), len(os.sched_getaffinity(0)))\n")
    return str(path)


def printed(done):
    assert done.returncode == 0, done.stderr
    return {line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}


def test_threads_per_rank_sets_the_threads_and_as_many_cores(threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    [mine] = topology.shares(CORES, 1, 1)
    assert printed(run("--threads-per-rank", "1", "-n", "1", threads)) == {f"1 {len(mine)}"}
    more = len(CORES) + 1
    assert printed(run("--threads-per-rank", str(more), "-n", "1", threads)) == {f"{more} {len(CORES)}"}


def test_ranks_that_outnumber_the_cores_have_one_thread_unless_the_user_says_otherwise(threads, monkeypatch):
    one = {min(CORES)}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert printed(run("-n", "1", threads, on=one)) == {"None 1"}
    assert printed(run("-n", "2", threads, on=one)) == {"1 1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert printed(run("-n", "2", threads, on=one)) == {"7 1"}


def test_to_bind_more_threads_than_cores_is_refused_with_the_figures(threads):
    done = run("--bind", "core", "--threads-per-rank", "2", "-n", "2", threads, on={min(CORES)})
    assert (done.returncode, done.stdout) == (2, "")
    assert "--bind core: expected at most as many threads as cores (1 by affinity, " in done.stderr
    assert done.stderr.endswith("got 2 ranks of 2 threads\n")


def test_the_launcher_itself_stays_where_it_was(program):
    code = (
        "import os, sys; from ringcomm.launcher.run import run; before = os.sched_getaffinity(0); "
        "status = run(sys.argv[1:], len(before)); sys.exit(status or before != os.sched_getaffinity(0))"
    )
    done = subprocess.run([sys.executable, "-c", code, program], capture_output=True, text=True, timeout=30)
    assert set.union(*cores_of_ranks(done)) == CORES
