"""`ringcomm bench --vs …` as a command: real peers side by side, and peers that crash, hang or are missing."""

import ast
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from quick_bench import BENCH

from ringcomm.bench import noise, peers, report
from ringcomm.bench.job import ALIAS, Job, Unsupported, shared_files, started
from ringcomm.commands.cli import main

pytestmark = pytest.mark.slow

PYTHON = Path(sys.prefix, "bin/python")


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cache folder in which the environment of the tests stands for those of Gloo and Open MPI; no MPICH."""
    folder = tmp_path_factory.mktemp("cache")
    for name in ("gloo", "openmpi"):
        path = folder / "ringcomm/peers" / peers.folder(name).name
        (path / "bin").mkdir(parents=True)
        for program in ("python", "mpirun"):
            # Not a link: Python finds its virtual environment by the path it was started with.
            (path / "bin" / program).write_text(f'#!/bin/sh\nexec "{PYTHON.parent / program}" "$@"\n')
            (path / "bin" / program).chmod(0o755)
        (path / peers.MARK).write_text(json.dumps(peers.PEERS[name].requirements))
    return folder


def command(words, cache, **variables):
    return {
        "args": [*BENCH, *words.split()],
        "env": os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"} | variables,
        "text": True,
    }


def bench(words, cache, **variables):
    return subprocess.run(**command(words, cache, **variables), capture_output=True, timeout=55, check=False)


@contextmanager
def running(words, cache):
    process = subprocess.Popen(**command(words, cache), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def table(text):
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def running_ranks():
    """Return the ranks that this test has started, as {(library, pid)}."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_text().split("\0")
            if words[1:3] == ["-m", ALIAS] and words[5].startswith(os.environ["TMPDIR"]):
                found.add((words[3], int(folder.name)))
    return found


def disturbances_of(pid):
    """Return the cores of each process that makes noise for `pid`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and noise.__file__ in (folder / "cmdline").read_text().split("\0"):
                found[int(folder.name)] = sorted(os.sched_getaffinity(int(folder.name)))
    return found


def rows_until(process, library):
    """Read the table up to the first row of `library`."""
    for line in process.stdout:
        if f" {library} " in line and not line.startswith("#"):
            return
    pytest.fail(f"no row of {library}")


def gone(pids, seconds=20):
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def bench_in(folder, words, cache):
    """Write out.json; ranks that import sitecustomize.py leave their command in `folder`."""
    site = f"import os, sys\nopen(os.path.join({str(folder)!r}, str(os.getpid())), 'w').write(str(sys.orig_argv))\n"
    (folder / "sitecustomize.py").write_text(site)
    return bench(f"{words} --json {folder}/out.json", cache, PYTHONPATH=str(folder))


def ranks_of_ringcomm(folder):
    """Return the commands of ranks that `bench_in` has started."""
    started = [ast.literal_eval(path.read_text()) for path in folder.glob("[0-9]*")]
    return [words[3:] for words in started if words[1:3] == ["-m", ALIAS]]


@pytest.fixture(scope="module")
def compared(cache, tmp_path_factory):
    """Bench every collective of every library; return how it ended and its folder."""
    folder = tmp_path_factory.mktemp("compared")
    options = "--vs gloo,openmpi,mpich,nccl --out-of-place --async --dtype int32 --op max --root 1"
    return bench_in(folder, f"all -b 4 -e 16K -f 4096 -n 2 -w 1 {options}", cache), folder


def test_every_collective_of_every_library_is_correct_and_listed_side_by_side(compared):
    run, folder = compared
    assert run.returncode == 0, run.stderr
    assert "mpich: not set up; run: ringcomm bench --setup-peers --vs mpich" in run.stderr
    assert re.search("nccl: (no CUDA device|supports CUDA buffers only)", run.stderr)
    comments = [line for line in run.stdout.splitlines() if line.startswith("#")]
    assert any(line.split()[1:] == [name for name, _, _ in report.COLUMNS] for line in comments)
    assert re.search(r"memcpy of 256 MiB.* GB/s per core", run.stdout)
    assert re.search(r"a cache line, from one core to another and back: \d+ to \d+ ns", run.stdout)
    lines = table(run.stdout)
    for size in ("4", "16384"):
        libraries = [line[5] for line in lines if line[0] == size]
        assert libraries[:3] == ["ringcomm", "gloo", "openmpi"], libraries
    document = json.loads((folder / "out.json").read_text())
    rows = document["rows"]
    assert {row["library"] for row in rows} == {"ringcomm", "gloo", "openmpi", "openmpi/multiple"}
    assert len({(row["library"], row["collective"]) for row in rows}) == 4 * 10
    assert {(row["library"], row["collective"]) for row in rows if row["wrong"] != 0} == set()
    assert {row["buffers"] for row in rows} == {"rotated", "cached"}
    assert all(row["p10"] <= row["median"] <= row["p90"] <= row["p99"] for row in rows)
    assert all(row["rounds"] == 2 for row in rows)
    assert document["versions"]["gloo"]["torch"]
    assert document["failures"] == []


def test_results_are_plotted(compared, tmp_path):
    document = json.loads((compared[1] / "out.json").read_text())
    document["rows"] = [row for row in document["rows"] if row["collective"] in ("all_reduce", "barrier")]
    (tmp_path / "some.json").write_text(json.dumps(document))  # to draw all takes 5 s
    assert main(["plot", f"{tmp_path}/some.json", "-o", f"{tmp_path}/out.png"]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_ranks_of_ringcomm_import_from_the_pythonpath_of_the_bench(compared):
    ranks = [words[0] for words in ranks_of_ringcomm(compared[1])]
    assert ranks == ["ringcomm", "ringcomm"]  # and not those of the others


def test_unbound_ranks_start_anew_for_each_time(cache, tmp_path):
    run = bench_in(tmp_path, "all_reduce -b 1K -e 1K -n 2 --unbound", cache)
    assert run.returncode == 0, run.stderr
    assert "2 ranks bound to no core" in run.stdout
    ranks = ranks_of_ringcomm(tmp_path)
    assert len(ranks) == 2 * 3, "once for the versions, then for each start"
    assert all("free" in words for words in ranks)
    assert [line[5] for line in table(run.stdout)] == ["ringcomm"]
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["versions"]["ringcomm"]["numpy"]
    assert [(row["unbound"], row["rounds"], row["wrong"]) for row in document["rows"]] == [(True, 2, 0)]


def test_a_request_that_ranks_refuse_at_their_start_is_reported():
    library = peers.LibrarySpec("us", "ringcomm", sys.executable, peers.run_ringcomm, "RINGCOMM_RANK")
    with pytest.raises(Unsupported, match=r"rank \d: AttributeError: .*nonsense"), started(library, 2, 20, "nonsense"):
        pass


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs a Python without ringcomm: that of the environment")
def test_the_launcher_finds_ringcomm_where_the_bench_has_found_it(monkeypatch, tmp_path):
    base = sys._base_executable
    monkeypatch.setattr(sys, "executable", base)
    here = [base, "-c", "import sys; print(sys.path)"]
    run = subprocess.run([*peers.run_ringcomm(1), *here], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    assert sys.prefix not in run.stdout, "the rank's own packages must not be hidden by those of the bench"


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, r"gloo in all_reduce of \d+ bytes: rank 1 ended during a request"),
        (signal.SIGSTOP, r"gloo in all_reduce of \d+ bytes: hangs: no answer from rank (0, )?1 within 3 s"),
    ],
    ids=["crashes", "hangs"],
)
def test_a_peer_that_fails_is_named_and_the_others_continue(cache, number, message):
    with running("all_reduce -b 32 -f 8 -e 2K -n 5 --vs gloo --timeout 3", cache) as process:
        rows_until(process, "gloo")
        pids = [pid for library, pid in running_ranks() if library == "gloo"]
        assert len(pids) == 2
        os.kill(rank_one(pids), number)
        out, err = process.communicate(timeout=50)
    assert re.search(message, err), err
    ours, theirs = table(out)[-2:]
    assert (ours[0], ours[5]) == ("2048", "ringcomm"), "the sizes after the failure are measured"
    assert theirs[5:8] == ["gloo", "not", "measured:"]
    assert process.returncode == 0
    assert gone(pids)


def rank_one(pids):
    return next(pid for pid in pids if b"RINGCOMM_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())


@pytest.mark.parametrize(
    ("number", "libraries"), [(signal.SIGINT, ["ringcomm", "gloo"]), (signal.SIGTERM, ["ringcomm"])]
)
def test_results_before_an_interrupt_are_kept(cache, tmp_path, number, libraries):
    options = f"--vs gloo --json {tmp_path}/out.json" if "gloo" in libraries else ""
    with running(f"all_reduce -e 64K {options}", cache) as process:
        rows_until(process, libraries[-1])
        pids = [pid for _, pid in running_ranks()]
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert ("; completed measurements are kept" in err) == bool(options)
    if options:
        assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["bytes"] == 4
    assert len(pids) == 2 * len(libraries)
    assert gone(pids)


def test_a_bench_under_nohup_continues_after_sighup(cache):
    words = command("all_reduce -b 4 -e 16 -n 2", cache)
    nohup = subprocess.Popen(["nohup", *words.pop("args")], **words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    nohup.stdout.readline()  # started
    nohup.send_signal(signal.SIGHUP)
    out, err = nohup.communicate(timeout=55)
    assert nohup.returncode == 0, err
    assert [line[0] for line in table(out)] == ["4", "16"]


@pytest.mark.parametrize("bound", [True, False])
def test_ranks_are_bound_to_a_core_unless_the_library_says_otherwise(bound):
    library = peers.LibrarySpec("us", "ringcomm", sys.executable, peers.run_ringcomm, "RINGCOMM_RANK", bound=bound)
    with tempfile.TemporaryDirectory(dir=os.environ["TMPDIR"]) as folder:
        job = Job(library, 2, Path(folder), timeout=20)
        cores = [os.sched_getaffinity(pid) for _, pid in running_ranks()]
        job.kill()
    all_cores = os.sched_getaffinity(0)
    assert len(cores) == 2
    assert all((len(each) == 1) if bound else (each == all_cores) for each in cores)


def test_shared_files_are_those_that_a_process_maps_shared():
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared, tempfile.NamedTemporaryFile(dir="/dev/shm") as private:
        maps = []
        for file, kind in ((shared, mmap.MAP_SHARED), (private, mmap.MAP_PRIVATE)):
            file.write(b"x")
            file.flush()
            maps.append(mmap.mmap(file.fileno(), 1, flags=kind))
        assert shared.name in shared_files(os.getpid())
        assert private.name not in shared_files(os.getpid())
        for each in maps:
            each.close()


def test_a_killed_bench_leaves_nothing_behind_with_noise_either(cache):
    # Not of Open MPI, whose launcher gets SIGTERM then and may leave files of its own.
    with running("all_reduce -e 64K -n 5 --noise", cache) as process:
        rows_until(process, "ringcomm")
        every_core = [[core] for core in sorted(os.sched_getaffinity(0))]
        while sorted((disturbances := disturbances_of(process.pid)).values()) != every_core:  # between two sizes
            assert process.poll() is None
        pids = [pid for _, pid in running_ranks()]
        process.kill()
    assert len(pids) == 2
    assert gone([*pids, *disturbances])


def test_unsupported_calls_and_broken_peers_are_reported(cache, tmp_path):
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    python = tmp_path / "ringcomm/peers" / peers.folder("gloo").name / "bin/python"
    python.write_text("#!/bin/sh\necho this python is broken >&2\nexit 3\n")
    words = "all_reduce broadcast -b 4 -e 16 -n 1 --op avg,sum --vs gloo,openmpi"
    run = bench(words, tmp_path)
    assert run.returncode == 0
    for line in (
        "gloo: could not be started: .*this python is broken; .*: delete .*/gloo-.*, then ringcomm bench --setup-peers",
        r"openmpi in all_reduce of 4 bytes: rank \d: ValueError: MPI has no operation avg",
    ):
        assert re.search(f"ringcomm bench: {line}", run.stderr), run.stderr
    assert run.stderr.count("openmpi in all_reduce") == 1
    found = {(line[3], line[5], line[6] == "not") for line in table(run.stdout)}
    assert {("sum", "openmpi", False), ("none", "openmpi", False), ("avg", "ringcomm", False)} <= found
    assert ("avg", "openmpi", False) not in found
    assert ("avg", "openmpi", True) in found, "the row says that it was not measured"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "which collective?"),
        ("all_reduce --json /nowhere/out.json", "/nowhere/out.json"),
        ("all_reduce --ranks 1000 -e 64G", "1000 ranks of 1 library (smaller: -e, --ranks, --vs) needs"),
    ],
)
def test_bad_input_is_reported_in_one_line(words, message, capsys):
    assert main(["bench", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert len(err.splitlines()) == 1
    assert not out


@pytest.fixture
def create_with(monkeypatch):
    """Return a function that lets virtual environments be created with `program` in place of python."""

    def use(program):
        def create(path, with_pip):
            assert with_pip
            assert not path.exists()
            (path / "bin").mkdir(parents=True)
            (path / "bin/python").symlink_to(program)

        monkeypatch.setattr(peers.venv, "create", create)

    return use


def test_an_environment_that_cannot_be_created_is_reported(create_with, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    create_with("/bin/false")
    assert peers.set_up(["gloo"]) == ["gloo"]
    err = capfd.readouterr().err
    assert "setting up gloo: torch==" in err
    assert "gloo could not be set up: pip failed, see above" in err
    assert not peers.is_set_up("gloo")


def test_only_an_environment_without_its_interpreter_is_created_anew(cache, create_with, monkeypatch, tmp_path):
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    create_with("/bin/true")
    gloo, openmpi = (peers.folder(name) / "bin/python" for name in ("gloo", "openmpi"))
    gloo.unlink()
    assert peers.set_up(["gloo", "openmpi"]) == []
    assert gloo.readlink() == Path("/bin/true")
    assert openmpi.read_text().startswith("#!/bin/sh")


def test_without_any_of_the_peers_asked_for_nothing_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["bench", "all_reduce", "--vs", "gloo,mpich"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert [line.split(": ")[1] for line in err.splitlines()] == ["gloo", "mpich", "--vs"]


@pytest.mark.parametrize("content", ["{}", "nonsense"])
def test_a_file_without_results_is_not_plotted(tmp_path, content, capsys):
    pytest.importorskip("matplotlib")
    data = tmp_path / "data.json"
    data.write_text(content)
    assert main(["plot", str(data), "-o", str(tmp_path / "out.png")]) == 2
    assert f"{data}: expected results of `ringcomm bench --json`" in capsys.readouterr().err
