"""How programs begin that `ringcomm run --respawn` starts, and how tests run them."""

from harness.jobs import run_job

ELASTIC = """
import ctypes, json, os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import ringcomm, ringcomm.elastic
from ringcomm.bootstrap import store

rank, restarts, size = (int(os.environ[f"RINGCOMM_{name}"]) for name in ("RANK", "RESTARTS", "SIZE"))
beside = Path(__file__).with_name

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def stop(*_, **__):
    os.kill(os.getpid(), signal.SIGSTOP)

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

def shrunk(comm):
    try:
        while True:
            comm.barrier()
    except ringcomm.PeerLost:
        return comm.shrink()

def lose(comm):
    if rank == 1:
        die()
    return shrunk(comm)

def complete(comm):
    assert comm.all_reduce(np.ones(1))[0] == size
    print(rank, restarts)
"""


def restarted(folder, text, respawn, *arguments, ranks=3, status=0, options=()):
    """Run a program under `ringcomm run --respawn`."""
    return run_job(folder, ranks, text, *arguments, options=("--respawn", str(respawn), *options), status=status)
