"""A rank that joins and then dies is named on every other rank at once, at every moment of the start."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path

import pytest

from failures import PROMPT
from ringcomm.bootstrap import rendezvous
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.store import job_store
from ringcomm.config import Config
from ringcomm.errors import PeerLost
from ringcomm.start import connect
from ringcomm.transports import shm

SIZE = 3
TIMEOUT = 60.0


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def after(function, holds):
    def wrapped(*args):
        result = function(*args)
        if holds(*args):
            die()
        return result

    return wrapped


# What the victim does at its end. A client receives the reply, then "go"; rank 0 sends them.
MOMENTS = {
    "joined the store": lambda: setattr(shm, "rendezvous", die),
    "said hello": lambda: setattr(rendezvous, "receive_packet", die),
    "maps the memory": lambda: setattr(shm, "ShmTransport", die),
    "is ready": lambda: setattr(
        rendezvous, "send_packet", after(rendezvous.send_packet, lambda _, message, *rest: "ready" in message)
    ),
}


def run_rank(job, rank, victim, moment):
    place = Place(rank, SIZE, job)
    started = time.monotonic()
    try:
        with job_store(place, TIMEOUT) as store:
            store.set(f"{rank} is here", b"")
            for other in range(SIZE):
                store.get(f"{other} is here", TIMEOUT)
            started = time.monotonic()
            if rank == victim:
                MOMENTS[moment]()
            comm = connect(rank, SIZE, store, Config(timeout=TIMEOUT))
        comm.barrier()  # once all are ready, the start succeeds without the victim
    except PeerLost as error:
        print(f"rank {error.rank} after {time.monotonic() - started:.3f} s: {error}", flush=True)


def announce_and_die(store, rank, *_):
    """Die before rank 0 has answered."""
    from ringcomm.torch import start

    store.set(f"{rank} is", f"name {start.host_id()}\n{start.process_id()}")
    time.sleep(0.5)  # until the others have seen this process
    die()


def run_torch_rank(path, rank, victim, moment):
    import torch.distributed as dist

    from ringcomm.torch import start

    timeout = timedelta(seconds=TIMEOUT)
    store = dist.FileStore(path, SIZE)
    store.set(f"{rank} is here", "")
    store.wait([f"{other} is here" for other in range(SIZE)], timeout)
    started = time.monotonic()
    if rank == victim:
        name, replacement = {"announced": ("_agree", announce_and_die), "agreed": ("_connect", die)}[moment]
        setattr(start, name, replacement)
    try:
        dist.init_process_group("ringcomm", store=store, rank=rank, world_size=SIZE, timeout=timeout)
    except PeerLost as error:
        print(f"rank {error.rank} after {time.monotonic() - started:.3f} s: {error}", flush=True)


def check_survivors(run, where, victim, moment):
    """Run each rank in a process; the survivors must name the victim, promptly."""
    paths = [str(folder) for folder in Path(__file__).parents[:2]]
    ranks = []
    for rank in range(SIZE):
        call = f"{run.__name__}({where!r}, {rank}, {victim}, {moment!r})"
        code = f"import sys; sys.path[:0] = {paths}; import {Path(__file__).stem} as tests; tests.{call}"
        ranks.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
    printed = [rank.communicate()[0] for rank in ranks]
    assert ranks.pop(victim).returncode == -signal.SIGKILL
    assert [rank.returncode for rank in ranks] == [0] * (SIZE - 1)
    printed.pop(victim)
    for line in printed:
        found = re.match(r"rank (\d) after ([\d.]+) s: .*rank \1 .*(exited during startup|died while)", line)
        assert found, line
        assert int(found[1]) == victim
        assert float(found[2]) < PROMPT


DEATHS = [(moment, 1) for moment in MOMENTS] + [("joined the store", 0), ("maps the memory", 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "victim"), DEATHS)
def test_survivors_of_a_start_name_the_rank_that_died(moment, victim):
    check_survivors(run_rank, uuid.uuid4().hex, victim, moment)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", ["announced", "agreed"])
def test_survivors_of_a_start_of_torch_name_the_rank_that_died(moment, victim, tmp_path):
    pytest.importorskip("torch")
    check_survivors(run_torch_rank, str(tmp_path / "store"), victim, moment)
