"""What torchrun reports of a job in which a rank fails."""

import re
import subprocess
import sys

import pytest

import harness

FAILS = """
import os, signal, sys, time
import torch, torch.distributed as dist

dist.init_process_group("ringcomm")
if sys.argv[1] == "killed":  # in a group that is not the first
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
    if sys.argv[1] == "raises":
        dist.destroy_process_group()
"""
LOST = r"\[rank0\]: ringcomm.errors.PeerLost: rank 1 \(process \d+\) died"
REPORTED = {"raises": r"\[rank1\]: ValueError: the data is wrong", "killed": LOST}


@pytest.mark.slow
@pytest.mark.parametrize("how", REPORTED)
def test_torchrun_names_the_rank_that_failed(tmp_path, how):
    path = tmp_path / "program.py"
    path.write_text(FAILS)
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", path, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * harness.OPERATION,
    )
    assert ended.returncode == 1, ended.stdout
    assert re.search(r"Root Cause.*?rank +: (\d+)", ended.stdout, re.DOTALL)[1] == "1", ended.stdout
    assert re.search(REPORTED[how], ended.stdout), ended.stdout
