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


@pytest.mark.parametrize("kind", MOUNTS)
def test_a_job_goes_on_where_the_disk_is_full(tmp_path, kind):
    (tmp_path / "disk").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)

    def run_mounted(script):
        command = ["unshare", "--mount", "sh", "-c", f"({MOUNTS[kind]}) >&2 && cd disk && {script}"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=harness.JOB, check=False)

    if run_mounted("true").returncode != 0:
        pytest.skip(f"no {kind} may be mounted here")
    ringcomm = f"{sys.executable} -m ringcomm"
    job = f"RINGCOMM_TRACE=calls RINGCOMM_DUMP=dump {ringcomm} run -n 2 ../program.py"
    ended = run_mounted(f"mkdir dump && {job} && ls -A dump && {ringcomm} trace calls")
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
