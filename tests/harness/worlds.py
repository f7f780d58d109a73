"""Worlds that a test may break, and the launchers that start them.

torchrun finds its ranks by a static rendezvous, for that of c10d needs the hosts' names.
"""

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import ringcomm
from harness import launched, mpi_world
from harness.hosts import ADDRESSES, several_hosts
from harness.nodes import SECRET, store_server
from harness.pools import Pool

PORT = 29500  # free on a host of its own
TIMEOUT = 60  # seconds, of an operation on hosts of their own


@contextmanager
def world(ranks, launcher="fork", settings=()):
    """Yield the pool of a world that the test may break.

    Args:
        ranks: their number, or a string with a character per rank, its host
        launcher: "fork", whose ranks only say that they are on several hosts; "nodes", which are forked, too, and have
            the store of launchers on several nodes; "openmpi" or "mpich", all on one host; "ringcomm run" or
            "torchrun", started once on each host, which has a network of its own (hosts.py)
        settings: pairs of a RINGCOMM_* variable and its value, for "fork" and "nodes"

    Functions that ranks run get a communicator, from MPI that of mpi4py, from torchrun none.
    """
    size, hosts = (ranks, "") if isinstance(ranks, int) else (len(ranks), ranks)
    with ExitStack() as held:
        if launcher == "nodes":
            store = held.enter_context(store_server())
            settings = ("RINGCOMM_STORE", store), ("RINGCOMM_JOB_SECRET", SECRET), *settings
        if launcher in ("fork", "nodes"):
            pool = Pool(size, settings, hosts)
        elif launcher in mpi_world.LIBRARIES:
            mpi_world.skip_without(launcher)
            pool = mpi_world.pool(size, mpi_world.start(launcher, size))
        else:
            pool = on_hosts([hosts.count(host) for host in sorted({*hosts})], launcher, held)
        held.callback(pool.kill)
        yield pool
        if launcher in LAUNCHERS:
            assert pool.end() == 0, pool.output()


def on_hosts(numbers, launcher, held):
    """Return a pool with so many ranks on each host."""
    hosts = held.enter_context(several_hosts(len(numbers)))

    def begin(output, address):
        program = launched.PROGRAM, __name__, launcher, address
        return start_on(hosts, numbers, launcher, *program, stdout=output, stderr=output)

    return launched.Pool(sum(numbers), begin)


def start_on(hosts, numbers, launcher, *program, **options):
    """Start a job with so many ranks on each of the `hosts`; return its launchers."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    env = {**os.environ, "RINGCOMM_JOB_SECRET": SECRET}
    return [
        subprocess.Popen(
            [*host.enter, sys.executable, *LAUNCHERS[launcher](len(numbers), node, number), *map(str, program)],
            env=env,
            text=True,
            **options,
        )
        for node, (host, number) in enumerate(zip(hosts, numbers, strict=True))
    ]


def place(hosts, node):
    return [f"--nnodes={hosts}", f"--node-rank={node}", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]


def ringcomm_run(hosts, node, ranks):
    return ["-m", "ringcomm", "run", *place(hosts, node), f"--start-timeout={TIMEOUT}", "-n", str(ranks)]


def torchrun(hosts, node, ranks):
    return ["-m", "torch.distributed.run", *place(hosts, node), f"--nproc-per-node={ranks}"]


LAUNCHERS = {"ringcomm run": ringcomm_run, "torchrun": torchrun}


def serve(launcher, address):
    """Serve as a rank (rank.py)."""
    if launcher == "torchrun":
        launched.answer(address, int(os.environ["RANK"]), None)
    else:
        with ringcomm.init(timeout=TIMEOUT) as comm:
            launched.answer(address, comm.rank, comm)
