"""A program for `ringcomm run --respawn`: traffic of all kinds on ranks that die at random moments.

    mortal.py KILLS SEED FOLDER

It ends once all ranks have been started KILLS times again in all, and prints how many calls it has made.
"""

import fcntl
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import ringcomm

KILLS, SEED, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
RANK, SIZE, RESTARTS = (int(os.environ[f"RINGCOMM_{name}"]) for name in ("RANK", "SIZE", "RESTARTS"))
PER_RANK = KILLS // SIZE
FEWEST = 2  # ranks that live: those that come back need one that they can join
DEAD = FOLDER / f"dead-{RANK}"  # from its death until it has joined again


def main():
    comm = ringcomm.init(timeout=60)
    DEAD.unlink(missing_ok=True)
    mine = random.Random(f"{SEED} {RANK} {RESTARTS}")
    if RESTARTS < PER_RANK:
        threading.Thread(target=die, args=(mine.expovariate(2),), daemon=True).start()
    calls = 0
    while True:
        try:
            restarts = comm.all_reduce(np.array([RESTARTS]))
            if comm.size == SIZE and restarts[0] == PER_RANK * SIZE:
                break
            shared = random.Random(str(comm.broadcast_object(mine.random())))
            with Sub(comm, shared) as group:
                for step in range(20):
                    traffic(shared.choice((comm, group)), shared, step)
                    calls += 1
            if comm.size < SIZE:
                comm = comm.grow(timeout=0)
        except (ringcomm.PeerLost, ringcomm.CollectiveTimeout, ringcomm.Aborted):
            comm = comm.shrink(timeout=30)
    print(f"rank {comm.rank} of {comm.size}: {calls} calls")
    comm.close()


class Sub:
    """A group of some ranks, aborted if its body fails: so that no other rank waits there."""

    def __init__(self, comm, shared):
        self.group = comm.split(shared.randrange(2) if shared.random() < 0.5 else comm.rank % 2)

    def __enter__(self):
        return self.group

    def __exit__(self, *_):
        self.group.close()


def traffic(comm, shared, step):
    count = shared.choice((1, 100, 5_000, 200_000))
    kind = shared.randrange(6)
    x = np.full(count, comm.rank + step, np.float64)
    ranks = comm.size * (comm.size - 1) / 2 + comm.size * step
    if kind == 0:
        assert (comm.all_reduce(x) == ranks).all()
    elif kind == 1:
        works = [comm.all_reduce(x.copy(), async_op=True) for _ in range(3)]
        assert all((work.wait() == ranks).all() for work in works)
    elif kind == 2:
        out = np.empty(count)
        comm.sendrecv(x, (comm.rank + 1) % comm.size, out, (comm.rank - 1) % comm.size)
        assert (out == (comm.rank - 1) % comm.size + step).all()
    elif kind == 3:
        assert (comm.all_gather(x) == np.arange(comm.size)[:, None] + step).all()
    elif kind == 4:
        root = shared.randrange(comm.size)
        assert (comm.broadcast(x, root) == root + step).all()
    else:
        symmetric = comm.empty(count, "float64")
        symmetric[:] = comm.rank + step
        assert (comm.all_reduce(symmetric) == ranks).all()


def may_die():
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if len([*FOLDER.glob("dead-*")]) >= SIZE - FEWEST:
            return False
        DEAD.touch()
        return True


def die(seconds):
    time.sleep(seconds)
    while not may_die():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


main()
