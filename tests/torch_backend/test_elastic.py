"""What torchrun reports of a job in which a rank fails."""

import os
import re
import subprocess
import sys

import pytest

import harness

FAILS = """
import os, signal, sys, time
import torch, torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("ringcomm")
if sys.argv[1] == "again":
    dist.destroy_process_group()
    dist.init_process_group("ringcomm")
dist.barrier()
if dist.get_rank() == 1:
    if sys.argv[1] == "raises":
        raise ValueError("the data is wrong")
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends the others, often before they have noticed
try:
    dist.all_reduce(torch.ones(1000))
finally:
    if sys.argv[1] != "killed":
        dist.destroy_process_group()
"""
REPEATS = 2


def reports(folder, how):
    """Run a job of three ranks, of which rank 1 fails, several times; return what torchrun printed each time."""
    path = folder / "program.py"
    path.write_text(FAILS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(REPEATS):
        ended = subprocess.run(
            [*torchrun, path, how],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * harness.OPERATION,
        )
        assert ended.returncode == 1, ended.stdout
        yield ended.stdout


def root_cause(report):
    return int(re.search(r"Root Cause.*?rank +: (\d+)", report, re.DOTALL)[1])


@pytest.mark.slow
def test_torchrun_names_the_rank_that_raised(tmp_path):
    for report in reports(tmp_path, "raises"):
        assert root_cause(report) == 1, report
        assert "[rank1]: ValueError: the data is wrong" in report


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "again"])
def test_the_others_name_the_killed_rank(tmp_path, how):
    for report in reports(tmp_path, how):
        assert root_cause(report) == 1, report
        assert re.search(r"\[rank[02]\]: ringcomm.errors.PeerLost: rank 1 \(process \d+\) died", report), report
