"""A rank that joins and then dies is named on every other rank at once, at every moment of the start."""

import os
import re
import signal
import socket
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


def run_torch_rank(where, rank, victim, moment):
    """Start with a store in the file `where`, or in rank 0 at that port."""
    import torch.distributed as dist

    from ringcomm.torch import start

    timeout = timedelta(seconds=TIMEOUT)
    if where.isdecimal():
        store = dist.TCPStore("localhost", int(where), SIZE, is_master=rank == 0, wait_for_workers=False)
    else:
        store = dist.FileStore(where, SIZE)
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
    if where.isdecimal() and rank == 0:
        time.sleep(1)  # the others ask its store who has died


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
@pytest.mark.parametrize("where", ["in a file", "in rank 0"])
def test_survivors_of_a_start_of_torch_name_the_rank_that_died(where, moment, victim, tmp_path):
    pytest.importorskip("torch")
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    check_survivors(run_torch_rank, str(tmp_path / "store" if where == "in a file" else port), victim, moment)


CONNECTED = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from ringcomm.torch import start

path, rank = sys.argv[1], int(sys.argv[2])
if rank == 2:
    connect = start.connect_ranks
    start.connect_ranks = lambda *args: (connect(*args), time.sleep(1))[0]
store = dist.FileStore(path, 3)
dist.init_process_group("ringcomm", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))
"""


@pytest.mark.slow
def test_a_rank_that_is_connected_may_exit_before_the_others_are(tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, "-c", CONNECTED, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(3)]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], errors
