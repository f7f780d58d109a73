"""How tests run code on ranks of several hosts: a pool that `ringcomm run` or torchrun starts, once on each host.

The hosts are those of two_hosts.py: the ranks find each other and exchange their data over TCP alone. torchrun finds
its ranks by a static rendezvous, for that of c10d needs the hosts' names.
"""

import os
import subprocess
import sys
from contextlib import contextmanager

import launched
import ringcomm
from nodes import SECRET
from two_hosts import ADDRESSES, several_hosts

PORT = 29500  # free on a host of its own
TIMEOUT = 60  # seconds, of an operation


def ringcomm_run(node, hosts, ranks):
    return ["-m", "ringcomm", "run", *place(node, hosts), f"--start-timeout={TIMEOUT}", "-n", str(ranks)]


def torchrun(node, hosts, ranks):
    return ["-m", "torch.distributed.run", *place(node, hosts), f"--nproc-per-node={ranks}"]


def place(node, hosts):
    return [f"--nnodes={hosts}", f"--node-rank={node}", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]


def start(hosts, ranks, launcher, *program, **options):
    """Start a job with so many `ranks` on each of the `hosts`; return its launchers."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    env = {**os.environ, "RINGCOMM_JOB_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [*host.enter, sys.executable, *launcher(node, len(ranks), number), *map(str, program)],
            env=env,
            text=True,
            **options,
        )
        for node, (host, number) in enumerate(zip(hosts, ranks, strict=True))
    ]


@contextmanager
def pool(*ranks, launcher=ringcomm_run):
    """Yield a pool with so many ranks on each host; those of torchrun get no communicator."""

    def begin(output, address):
        return start(hosts, ranks, launcher, __file__, launcher.__name__, address, stdout=output, stderr=output)

    with several_hosts(len(ranks)) as hosts:
        started = launched.Pool(sum(ranks), begin)
        try:
            yield started
            assert started.end() == 0, started.output()
        finally:
            started.kill()


def serve(launcher, address):
    if launcher == torchrun.__name__:
        launched.answer(address, int(os.environ["RANK"]), None)
    else:
        with ringcomm.init(timeout=TIMEOUT) as comm:
            launched.answer(address, comm.rank, comm)


if __name__ == "__main__":
    launched.import_as_pytest()
    serve(*sys.argv[1:])
