"""`ringcomm bench --vs …` as a command: real peers side by side, and peers that crash, hang or are not there."""

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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from ringcomm.bench import peers, report, rounds
from ringcomm.bench.job import ALIAS, START, shared_files

pytestmark = pytest.mark.slow

PYTHON = Path(sys.prefix, "bin/python")


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cache folder in which the environment of the tests stands for those of Gloo and Open MPI; no MPICH."""
    folder = tmp_path_factory.mktemp("cache")
    for name in ("gloo", "openmpi"):
        place = folder / "ringcomm/peers" / peers.folder(name).name
        (place / "bin").mkdir(parents=True)
        for program in ("python", "mpirun"):
            # Not a link: a virtual environment is found from where its python was started.
            (place / "bin" / program).write_text(f'#!/bin/sh\nexec "{PYTHON.parent / program}" "$@"\n')
            (place / "bin" / program).chmod(0o755)
        (place / peers.MARK).write_text(json.dumps(peers.PEERS[name].requirements))
    return folder


def command(words, cache):
    return {
        "args": [sys.executable, "-m", "ringcomm", "bench", *words.split()],
        "env": os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"},
        "text": True,
    }


def bench(words, cache):
    return subprocess.run(**command(words, cache), capture_output=True, timeout=55, check=False)


def plot(data, picture):
    words = [sys.executable, "-m", "ringcomm", "plot", data, "-o", picture]
    return subprocess.run(words, capture_output=True, text=True, timeout=55, check=False)


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


def ranks_of(process):
    """Return the ranks that this bench has started: their sockets lie in its folders. {(library, pid)}"""
    found = set()
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (folder / "cmdline").read_text().split("\0")
            if words[1:3] == ["-m", ALIAS] and ancestor(process.pid, int(folder.name)):
                found.add((words[3], int(folder.name)))
    return found


def ancestor(pid, of):
    while of > 1:
        if of == pid:
            return True
        of = int(Path(f"/proc/{of}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def rows_until(process, library):
    """Read the table until a row of `library` has come."""
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


def test_all_libraries_stand_side_by_side(cache, tmp_path):
    run = bench(f"all_reduce -e 1K -f 16 -n 3 --vs gloo,openmpi,mpich,nccl --json {tmp_path}/out.json", cache)
    assert run.returncode == 0, run.stderr
    assert "mpich: not set up; run: ringcomm bench --setup-peers --vs mpich" in run.stderr
    assert re.search("nccl: (no CUDA device|it moves CUDA buffers only)", run.stderr)
    comments = [line for line in run.stdout.splitlines() if line.startswith("#")]
    assert any(line.split()[1:] == [name for name, _, _ in report.COLUMNS] for line in comments)
    assert re.search(r"memcpy of 256 MiB.* GB/s per core", run.stdout)
    lines = table(run.stdout)
    for size in ("4", "64", "1024"):
        libraries = [line[5] for line in lines if line[0] == size]
        assert libraries[:3] == ["ringcomm", "gloo", "openmpi"], libraries
    document = json.loads((tmp_path / "out.json").read_text())
    assert {row["library"] for row in document["rows"]} == {"ringcomm", "gloo", "openmpi", "openmpi/multiple"}
    assert {row["buffers"] for row in document["rows"]} == {"rotated", "cached"}
    assert all(row["p10"] <= row["median"] <= row["p90"] <= row["p99"] for row in document["rows"])
    assert all(row["wrong"] == 0 and row["rounds"] == 3 for row in document["rows"])
    assert document["versions"]["gloo"]["torch"]
    assert document["failures"] == []


@pytest.mark.parametrize(
    "options",
    [
        "--out-of-place --async --dtype int32 --op max --root 1",
        pytest.param("--symmetric", marks=pytest.mark.exhaustive),
    ],
)
def test_every_collective_of_every_library_is_right(cache, tmp_path, options):
    run = bench(f"all -b 256 -e 20K -f 80 -n 1 -w 1 --vs gloo,openmpi --json {tmp_path}/out.json {options}", cache)
    assert run.returncode == 0, run.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["failures"] == []
    assert {(row["library"], row["collective"]) for row in document["rows"] if row["wrong"] != 0} == set()
    assert len({(row["library"], row["collective"]) for row in document["rows"]}) == 4 * 10


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, r"gloo in all_reduce of \d+ bytes: rank 1 ended in the middle"),
        (signal.SIGSTOP, r"gloo in all_reduce of \d+ bytes: hangs: no answer from rank (0, )?1 within 3 s"),
    ],
    ids=["crashes", "hangs"],
)
def test_a_peer_that_fails_is_named_and_the_others_go_on(cache, number, told):
    with running("all_reduce -f 8 -e 2K -n 5 --vs gloo --patience 3", cache) as process:
        rows_until(process, "gloo")
        pids = [pid for library, pid in ranks_of(process) if library == "gloo"]
        assert len(pids) == 2
        os.kill(rank_one(pids), number)
        out, err = process.communicate(timeout=50)
    assert re.search(told, err), err
    assert table(out)[-1][0] == "2048", "the sizes after the failure are measured"
    assert table(out)[-1][5] == "ringcomm"
    assert process.returncode == 0
    assert gone(pids)


def test_ranks_of_ringcomm_find_what_the_bench_has_found(cache, tmp_path):
    site = f"import os, sys\nopen(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w').write(str(sys.orig_argv))\n"
    (tmp_path / "sitecustomize.py").write_text(site)
    words = command("broadcast -b 4 -e 4 -n 1 -w 1 --vs gloo", cache)
    words["env"]["PYTHONPATH"] = str(tmp_path)
    run = subprocess.run(**words, capture_output=True, timeout=55, check=False)
    assert run.returncode == 0, run.stderr
    started = [ast.literal_eval(path.read_text()) for path in tmp_path.glob("[0-9]*")]
    ranks = [words[3] for words in started if words[1:3] == ["-m", ALIAS]]
    assert ranks == ["ours", "ours"]  # and not those of Gloo


def test_the_start_of_a_job_does_not_try_the_patience(monkeypatch):
    monkeypatch.setattr(rounds, "COPY_BYTES", 1 << 16)
    asked = []

    class Job(rounds.Job):
        def ask(self, *request, **given):
            asked.append((*request, given))
            return super().ask(*request, **given)

    monkeypatch.setattr(rounds, "Job", Job)
    lineup = rounds.Lineup(plan=None, ranks=2, patience=0, progress=lambda *_: None)
    with ExitStack() as stack:
        lineup.start(peers.contenders([])[0], stack)
        assert lineup.failures == []
    assert asked == [("prepare_memcpy", 1 << 16, {"limit": START})]


def rank_one(pids):
    return next(pid for pid in pids if b"RINGCOMM_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_before_an_interrupt_is_kept(cache, tmp_path, number):
    with running(f"all_reduce -e 64K --vs gloo --json {tmp_path}/out.json", cache) as process:
        rows_until(process, "gloo")
        pids = [pid for _, pid in ranks_of(process)]
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert "interrupted: what was measured so far is kept" in err
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["bytes"] == 4
    assert len(pids) == 4
    assert gone(pids)


def test_a_bench_under_nohup_goes_on_when_its_terminal_is_closed(cache):
    words = command("all_reduce -b 4 -e 16 -n 2", cache)
    nohup = subprocess.Popen(["nohup", *words.pop("args")], **words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    nohup.stdout.readline()  # it has begun
    nohup.send_signal(signal.SIGHUP)
    out, err = nohup.communicate(timeout=55)
    assert nohup.returncode == 0, err
    assert [line[0] for line in table(out)] == ["4", "16"]


def test_only_what_a_process_shares_in_dev_shm_is_taken_for_left_behind():
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


def test_nothing_stays_behind_when_the_bench_is_killed(cache):
    # Not of Open MPI, whose launcher gets SIGTERM then, and may leave files of its own.
    with running("all_reduce -e 64K --vs gloo", cache) as process:
        rows_until(process, "gloo")
        pids = [pid for _, pid in ranks_of(process)]
        process.kill()
    assert len(pids) == 4
    assert gone(pids)


def test_a_ratio_that_is_missed_fails(cache):
    run = bench("broadcast -b 4 -e 4 -n 2 --vs gloo --min-ratio 1e9", cache)
    assert run.returncode == 1
    assert re.search("under 1e.09 x: broadcast of 4 bytes on 2 ranks, (rotated|cached) buffers: .* x gloo", run.stderr)


def test_a_library_that_cannot_do_it_says_so_once_and_does_the_rest(cache):
    run = bench("all_reduce broadcast -b 4 -e 16 -n 1 --vs openmpi --op avg,sum", cache)
    assert run.returncode == 0, run.stderr
    assert re.search(r"openmpi in all_reduce of 4 bytes: rank \d: ValueError: MPI has no operation avg", run.stderr)
    assert run.stderr.count("openmpi in all_reduce") == 1
    found = {(line[3], line[5]) for line in table(run.stdout)}
    assert {("sum", "openmpi"), ("none", "openmpi"), ("avg", "ringcomm")} <= found
    assert ("avg", "openmpi") not in found


def test_a_ratio_to_a_peer_that_was_not_measured_is_missed(cache):
    run = bench("broadcast -b 4 -e 4 -n 1 --vs mpich --min-ratio 1", cache)
    assert run.returncode == 1
    assert "nothing to compare with: mpich was not measured" in run.stderr


def test_a_peer_that_cannot_be_started_is_told(cache, tmp_path):
    place = tmp_path / "ringcomm/peers" / peers.folder("gloo").name
    shutil.copytree(cache / "ringcomm/peers" / place.name, place)
    (place / "bin/python").write_text("#!/bin/sh\necho this python is broken >&2\nexit 3\n")
    run = bench("broadcast -b 4 -e 4 -n 1 --vs gloo", tmp_path)
    assert run.returncode == 0, run.stderr
    assert re.search("ringcomm bench: gloo: could not be started: .*this python is broken", run.stderr)
    assert [line[5] for line in table(run.stdout)] == ["ringcomm"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "which collective?"),
        ("all_reduce --vs gloom", "unknown peer 'gloom'; known:"),
        ("all_reduce -b 8 -e 4", "expected -b <= -e"),
        ("all_reduce --min-ratio 1", "expected --vs"),
        ("all_reduce --virtual-ranks --device emulated --symmetric", "neither --vs, --symmetric nor --async"),
        ("all_reduce --json /nowhere/out.json", "/nowhere/out.json"),
        ("all_reduce --ranks 1000 -e 64G", "1000 ranks of 1 libraries"),
    ],
)
def test_bad_input_is_told_in_a_line(cache, words, told):
    run = bench(words, cache)
    assert run.returncode == 2
    assert told in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not run.stdout


def test_an_environment_that_cannot_be_made_is_told(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nowhere = peers.Peer(
        "gloo", "torch", (str(tmp_path / "no-such-package"),), peers.run_ringcomm, "RINGCOMM_RANK", variants={"": {}}
    )
    monkeypatch.setitem(peers.PEERS, "gloo", nowhere)
    assert peers.set_up(["gloo"]) == ["gloo"]
    err = capfd.readouterr().err
    assert "no-such-package" in err
    assert "gloo could not be set up: pip failed, see above" in err
    assert not peers.is_set_up("gloo")


def test_an_environment_that_is_whole_is_left_alone(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    before = (peers.folder("gloo") / peers.MARK).stat().st_mtime_ns
    assert peers.set_up(["gloo"]) == []
    assert (peers.folder("gloo") / peers.MARK).stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["gloo", "openmpi"])
@pytest.mark.parametrize("damage", ["no python", "a python that fails", "no module"])
def test_an_environment_that_is_damaged_is_made_anew(cache, monkeypatch, tmp_path, name, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = peers.folder(name)
    shutil.copytree(cache / "ringcomm/peers" / place.name, place)
    python = place / "bin/python"
    if damage == "no python":
        python.unlink()
    elif damage == "a python that fails":
        python.write_text("#!/bin/sh\nexit 1\n")
    else:
        python.write_text(f'#!/bin/sh\nexec "{PYTHON}" -S "$@"\n')  # nothing that was installed

    def create(place, with_pip):
        assert with_pip
        assert not place.exists()
        (place / "bin").mkdir(parents=True)
        (place / "bin/python").symlink_to("/bin/true")  # whatever it is to install

    monkeypatch.setattr(peers.venv, "create", create)
    assert peers.set_up([name]) == []
    assert python.readlink() == Path("/bin/true")


def test_results_are_drawn(cache, tmp_path):
    data, picture = tmp_path / "out.json", tmp_path / "out.png"
    assert bench(f"all_reduce -e 64 -n 2 --json {data}", cache).returncode == 0
    run = plot(data, picture)
    assert run.returncode == 0, run.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", ["{}", "nonsense"])
def test_what_cannot_be_drawn_is_told(tmp_path, content):
    data = tmp_path / "data.json"
    data.write_text(content)
    run = plot(data, tmp_path / "out.png")
    assert run.returncode == 2
    assert f"{data}: expected a file that `ringcomm bench --json` wrote" in run.stderr
