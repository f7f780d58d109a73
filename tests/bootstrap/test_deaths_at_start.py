"""A rank that joins and then dies is named on every other rank at once, at every moment of the start."""

import json
import os
import re
import signal
import time
import uuid
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest

import harness
from harness.failures import PROMPT, until
from ringcomm.bootstrap import descriptor_exchange
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.session import Contribution
from ringcomm.bootstrap.store import job_store
from ringcomm.config import Config
from ringcomm.errors import PeerLost
from ringcomm.machine.files import write_atomic
from ringcomm.start import connect
from ringcomm.testing.ranks import start_process
from ringcomm.transports import shm

SIZE = 3
TIMEOUT = 60.0


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def at_the_gather_of(name):
    """Die after the gather of this name."""
    gather = descriptor_exchange.all_gather_facts

    def wrapped(store, gathered, *args, **options):
        result = gather(store, gathered, *args, **options)
        if gathered == name:
            die()
        return result

    descriptor_exchange.all_gather_facts = wrapped


# What the victim does at its end.
MOMENTS = {
    "joined the store": lambda: setattr(shm, "exchange_descriptors", die),
    "said hello": lambda: at_the_gather_of(descriptor_exchange.HELLO),
    "asked for descriptors": lambda: setattr(descriptor_exchange._Client, "_receive", die),
    "maps the memory": lambda: setattr(shm, "ShmTransport", die),
    "is ready": lambda: at_the_gather_of(descriptor_exchange.READY),
}


def run_rank(connection, job, rank, victim, moment):
    place = Place(rank, SIZE, job)
    started = time.monotonic()
    try:
        with job_store(place, TIMEOUT) as store:
            store.all_gather(Contribution("here", rank, SIZE, b""), TIMEOUT)
            started = time.monotonic()
            if rank == victim:
                MOMENTS[moment]()
            comm = connect(rank, SIZE, store, Config(timeout=TIMEOUT))
        comm.barrier()  # once all are ready, the start succeeds without the victim
    except PeerLost as error:
        connection.send((error.rank, time.monotonic() - started, str(error)))


def torch_store(where, rank):
    """Return a store in the file `where`, or in rank 0, which writes its port to that file."""
    import torch.distributed as dist

    if Path(where).name == "store":
        return dist.FileStore(where, SIZE)
    port = Path(where)
    if rank == 0:
        store = dist.TCPStore("localhost", 0, SIZE, is_master=True, wait_for_workers=False)
        write_atomic(port, str(store.port).encode())
        return store
    until(port.exists, "the port of rank 0")
    return dist.TCPStore("localhost", int(port.read_text()), SIZE, wait_for_workers=False)


def run_torch_rank(connection, where, rank, victim, moment):
    import torch.distributed as dist

    from ringcomm.bootstrap import rendezvous as module

    timeout = timedelta(seconds=TIMEOUT)
    store = torch_store(where, rank)
    is_running, gather = module.is_running, module.ranks_of_host
    others = [other for other in range(SIZE) if other != victim]

    def look_and_report(process):
        found = is_running(process)
        with suppress(dist.DistNetworkError):  # it was that of rank 0
            store.set(f"{rank} sees it", "")
        return found

    def join_and_report(*arguments):
        store.set(f"{rank} has joined", "")
        return gather(*arguments)

    def join_and_die(*_):
        store.wait([f"{other} has joined" for other in others], timeout)
        die()

    def publish_and_die(start):
        """Die once the others have seen that this process runs."""
        where = {"address": "127.0.0.1:1", "secret": "", "host": module.host_id(), "process": module.process_id()}
        start._keys.set(module.KEY, json.dumps(where))
        store.wait([f"{other} sees it" for other in others], timeout)
        die()

    module.is_running, module.ranks_of_host = look_and_report, join_and_report
    store.set(f"{rank} is here", "")
    store.wait([f"{other} is here" for other in range(SIZE)], timeout)
    started = time.monotonic()
    if rank == victim:
        moments = {
            "published": (module.Rendezvous, "serve", publish_and_die),
            "joined": (module, "ranks_of_host", join_and_die),
        }
        setattr(*moments[moment])
    try:
        dist.init_process_group("ringcomm", store=store, rank=rank, world_size=SIZE, timeout=timeout)
    except PeerLost as error:
        connection.send((error.rank, time.monotonic() - started, str(error)))
    if victim != 0:  # whose store the others may still ask
        store.set(f"{rank} is done", "")
        if rank == 0:
            store.wait([f"{other} is done" for other in range(1, SIZE) if other != victim], timeout)


@contextmanager
def processes(run, arguments):
    """Call `run(connection, *each)` in a process for each of the arguments; kill what still runs at the end."""
    started = [start_process(run, *each, name="rank") for each in arguments]
    try:
        yield started
    finally:
        for process, connection in started:
            connection.close()
            process.kill()
            process.join()
            process.close()


def exit_status(process):
    process.join(harness.OPERATION)
    return process.exitcode


def check_survivors(run, where, victim, moment):
    """Run each rank in a process; the survivors must name the victim, promptly."""
    with processes(run, [(where, rank, victim, moment) for rank in range(SIZE)]) as ranks:
        for rank, (process, connection) in enumerate(ranks):
            if rank != victim:
                lost, seconds, text = connection.recv()
                assert lost == victim
                assert re.search(rf"rank {victim} .*(exited|has ended) during startup|died while", text), text
                assert seconds < PROMPT
            assert exit_status(process) == (0 if rank != victim else -signal.SIGKILL)


DEATHS = [(moment, 1) for moment in MOMENTS] + [("joined the store", 0), ("maps the memory", 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "victim"), DEATHS)
def test_survivors_of_a_start_name_the_rank_that_died(moment, victim):
    check_survivors(run_rank, uuid.uuid4().hex, victim, moment)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "victim"), [("published", 0), ("joined", 0), ("joined", 1)])
@pytest.mark.parametrize("where", ["store", "port"])
def test_survivors_of_a_start_of_torch_name_the_rank_that_died(where, moment, victim, tmp_path):
    pytest.importorskip("torch")
    check_survivors(run_torch_rank, str(tmp_path / where), victim, moment)


@pytest.mark.slow
def test_a_start_of_torch_ignores_what_an_earlier_one_has_left(tmp_path):
    pytest.importorskip("torch")
    with processes(connect_twice, [(str(tmp_path / "store"), rank) for rank in range(2)]) as ranks:
        assert [exit_status(process) for process, _ in ranks] == [0, 0]


def connect_twice(_, path, rank):
    """Connect, where a process that has ended has left its start, and again, where rank 0 still serves the first."""
    import torch.distributed as dist

    from ringcomm.bootstrap import rendezvous as module

    store, config = dist.FileStore(path, 2), Config(timeout=TIMEOUT)
    connect = module.Rendezvous.connect

    def connect_and_report(start, seconds):
        try:
            return connect(start, seconds)
        except ConnectionError:
            store.set(f"{attempt} has nothing to join", "")
            raise

    module.Rendezvous.connect = connect_and_report
    if rank:
        process = f"{module.process_id().rpartition(' ')[0]} 1"  # whose id this one has now
        left = {"address": "127.0.0.1:1", "secret": "left", "host": module.host_id(), "process": process}
        store.set(module.KEY, json.dumps(left))
    for attempt in range(2):
        if rank == 0 and attempt == 0:
            store.wait(["0 has nothing to join"], timedelta(seconds=TIMEOUT))
        start = module.Rendezvous(store, "", rank, 2, config)
        with start.open():
            assert not start.hosts
            if rank == 0 and attempt == 0:
                store.wait(["1 has nothing to join"], timedelta(seconds=TIMEOUT))


def connect_and_leave(connection, path, rank):
    import torch.distributed as dist

    from ringcomm.torch import start

    if rank == 2:
        connect = start.connect_ranks
        # Rank 1 has ended when this returns.
        start.connect_ranks = lambda *args, **options: (connect(*args, **options), connection.recv())[0]
    store = dist.FileStore(path, 3)
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))


@pytest.mark.slow
def test_a_rank_that_is_connected_may_exit_before_the_others_are(tmp_path):
    pytest.importorskip("torch")
    arguments = [(str(tmp_path / "store"), rank) for rank in range(3)]
    with processes(connect_and_leave, arguments) as ranks:
        assert exit_status(ranks[1][0]) == 0
        ranks[2][1].send("rank 1 has ended")
        assert [exit_status(process) for process, _ in ranks] == [0, 0, 0]
