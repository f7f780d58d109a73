"""The harness itself: pools serve many jobs and are replaced when one fails, and leftovers are detected."""

import os
import subprocess
import tempfile
import threading

import numpy as np
import pytest

import harness
import ringcomm
from harness import leftovers, pools


def pid(comm):
    comm.barrier()
    return os.getpid()


def fail_on_rank(comm, rank):
    if comm.rank == rank:
        raise ValueError("on purpose")
    comm.barrier()


def never_end(comm):  # noqa: ARG001
    threading.Event().wait()


def test_a_pool_serves_many_jobs():
    pids = harness.run(pid, 2)
    assert len(set(pids)) == 2
    assert harness.run(pid, 2) == pids


def test_a_failure_carries_its_rank_and_the_pool_is_replaced():
    pids = harness.run(pid, 2)
    with pytest.raises(ValueError, match="on purpose") as caught:
        harness.run(fail_on_rank, 2, 1)
    assert caught.value.__notes__[0].startswith("on rank 1:")
    assert not set(pids) & set(harness.run(pid, 2))


def test_a_job_that_never_ends_is_killed(monkeypatch):
    harness.run(pid, 2)
    monkeypatch.setattr(pools, "JOB", 0.3)
    with pytest.raises(TimeoutError, match=r"never_end.*\[0, 1\]"):
        harness.run(never_end, 2)


def test_leftovers_are_detected():
    before = leftovers.footprint()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    with tempfile.NamedTemporaryFile(dir="/dev/shm"), subprocess.Popen(["sleep", "60"]) as process:
        left = "\n".join(leftovers.footprint() - before)
        process.kill()
    stop.set()
    thread.join()
    for trace in ("thread forgotten", "descriptor /dev/shm", "file /dev/shm", f"process {process.pid}"):
        assert trace in left
    assert not leftovers.left_behind(before)


def test_native_workers_are_detected_until_close():
    before = leftovers.footprint()
    with ringcomm.init() as comm:
        x = np.zeros(1)
        work = [comm.all_reduce(x, async_op=True), comm.recv(np.zeros(1), peer=0, async_op=True)]
        for call in work:
            call.add_done_callback(lambda _: None)  # without one, no thread would run it
        comm.send(x, peer=0)
        for call in work:
            call.wait()
        left = leftovers.footprint() - before
    assert {"native thread ringcomm-coll", "native thread ringcomm-p2p"} <= left.keys()
    assert not leftovers.left_behind(before)
