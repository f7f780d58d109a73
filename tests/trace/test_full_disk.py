"""A disk that fills while a job writes its traces and flight records: the job goes on, and the report tells."""

import re
import subprocess
import sys

import pytest

import harness

CALLS = 60_000  # of each rank: 3.7 MiB
PROGRAM = f"""
from contextlib import suppress
import numpy as np
import ringcomm

with ringcomm.init(timeout=20) as comm:
    x, wrong = np.empty(1, np.int64), 0
    for turn in range({CALLS}):
        x[0] = turn
        wrong += comm.all_reduce(x)[0] != turn * comm.size
    if comm.rank == 0:
        with suppress(OSError), open("filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    comm.barrier()
    with suppress(ringcomm.MismatchError):
        comm.all_reduce(np.ones(1 + comm.rank))
    x[0] = 1
    print(wrong, comm.all_reduce(x)[0])
"""
MOUNTS = {
    "tmpfs": "mount -t tmpfs -o size=4m none disk",
    # It allocates what it still has of a range before it fails.
    "ext4": "truncate -s 4M image && mkfs.ext4 -q -O ^has_journal image && mount -o loop image disk",
}


# Rank 1 is lost, and joins again, three times: the disk has no room for the traces of all these groups.
ELASTIC = """
import os
import signal
import ringcomm

comm = ringcomm.init(timeout=20)
while int(os.environ["RINGCOMM_RESTARTS"]) < 3 and comm.rank == 1:
    comm.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
for turn in range(3 if comm.rank != 1 else 0):
    try:
        while True:
            comm.barrier()
    except ringcomm.PeerLost:
        comm = comm.shrink().grow()
comm.barrier()
print(comm.size)
"""


@pytest.fixture(params=MOUNTS)
def run_mounted(request, tmp_path):
    """Return what runs a script in a folder "disk" of 4 MiB, beside a program."""
    (tmp_path / "disk").mkdir()

    def run(script, program=""):
        (tmp_path / "program.py").write_text(program)
        command = ["unshare", "--mount", "sh", "-c", f"({MOUNTS[request.param]}) >&2 && cd disk && {script}"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=harness.JOB, check=False)

    if run("true").returncode != 0:
        pytest.skip(f"no {request.param} may be mounted here")
    return run


POINTS = "where RINGCOMM_TRACE points"
RINGCOMM = f"{sys.executable} -m ringcomm"


def test_a_job_goes_on_where_the_disk_is_full(run_mounted):
    job = f"RINGCOMM_TRACE=calls RINGCOMM_DUMP=dump {RINGCOMM} run -n 2 ../program.py"
    ended = run_mounted(f"mkdir dump && {job} && ls -A dump && {RINGCOMM} trace calls", PROGRAM)
    assert ended.returncode == 0, ended.stderr
    results, report = ended.stdout.split("\n", 2)[:2], ended.stdout.split("\n", 2)[2]
    assert sorted(results) == ["[0] 0 2", "[1] 0 2"]
    told = re.match(r"2 ranks, 1 group, ([\d,]+) calls in \S+ s; there was no room for ([\d,]+) more\n", report)
    assert told, ended.stdout
    recorded, dropped = (int(number.replace(",", "")) for number in told.groups())
    assert recorded + dropped == 2 * (CALLS + 3)
    assert recorded > 2 * 16_000
    assert "cannot write a flight record to dump, where RINGCOMM_DUMP points: No space left on device" in ended.stderr
    assert "cut short" not in ended.stderr


def test_groups_for_whose_traces_the_disk_has_no_room_work_untraced(run_mounted):
    ended = run_mounted(f"RINGCOMM_TRACE=calls {RINGCOMM} run -n 3 --respawn 3 ../program.py", ELASTIC)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[0] 3", "[1] 3", "[2] 3"]
    assert "Traceback" not in ended.stderr
    text = f"cannot write a trace to calls, {POINTS}: .*No space left on device; groups without a file there"
    for rank in (0, 2):
        assert len(re.findall(rf"^\[{rank}\] .*{text}", ended.stderr, re.MULTILINE)) == 1


def test_init_refuses_a_disk_that_is_full_with_one_error(run_mounted):
    fill = "head -c 5M /dev/zero > filler"
    ended = run_mounted(
        f"{fill}; RINGCOMM_TRACE=calls {sys.executable} ../program.py", "import ringcomm as r; r.init()"
    )
    assert ended.stderr.count("Traceback") == 1
    assert f"cannot write a trace to calls, {POINTS}: No space left on device" in ended.stderr
