"""A job on several nodes: one `ringcomm run` for each, all on this machine."""

import os
import socket
import subprocess
import sys
import textwrap
from contextlib import contextmanager

from harness import pools
from ringcomm.bootstrap.client import Client
from ringcomm.bootstrap.server import Server
from ringcomm.bootstrap.session import Contribution
from ringcomm.bootstrap.wire.addresses import listen
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.bootstrap.wire.tcp import TcpGate

SECRET = 32 * "5a"  # the same in every process of the tests: it is part of their names

# `ringcomm run` with less patience after a failure.
IMPATIENT = """
import signal, sys
from ringcomm.bootstrap import server, store
from ringcomm.commands.cli import main
from ringcomm.launcher import nodes, supervisor
nodes.LATE = store.LATE = server.LINGER = 1.0
supervisor.ESCALATION = (0.1, signal.SIGTERM), (0.5, signal.SIGKILL)
{patch}
sys.exit(main())
"""
# `exchange` gets a value of each rank.
PROGRAM = """
import os, signal, sys, time
from ringcomm.bootstrap.place import find_place
from ringcomm.bootstrap.store import all_gather_facts, open_store

place = find_place()
rank, size = place.rank, place.size

def exchange(value=None):
    with open_store(place, 20) as store:
        return all_gather_facts(store, "values", rank, size, str(value or f"from {rank}"), 20)
"""


class StartClient(Client):
    """A rank in the store of a start, in which one rank alone gives each value."""

    def set(self, key, value):
        self.all_gather(Contribution(key, 0, 1, value), 20)

    def find(self, key, *how):
        value = super().find(key, *how)
        return value and value[1:-1]


@contextmanager
def store_server(host="127.0.0.1", tls=None):
    """Serve stores as the launcher of node 0 does; yield the address."""
    gate = TcpGate([listen(host, [0], "--master-addr")], [SECRET.encode()], KEEPALIVE, tls)
    server = Server(gate, None)
    try:
        yield gate.addresses[0]
    finally:
        server.close()


class Job:
    """Starts the launchers of a job, and ends them with the test."""

    def __init__(self, folder, count):
        self.folder, self.count = folder, count
        self.launchers = []
        # Bound with SO_REUSEADDR but not listening, it keeps the port from all who ask for a free one.
        self.reserved = socket.socket()
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind(("127.0.0.1", 0))
        self.address = self.reserved.getsockname()

    def program(self, text):
        path = self.folder / "program.py"
        path.write_text(PROGRAM + textwrap.dedent(text))
        return str(path)

    def start(
        self,
        node,
        ranks,
        program,
        *options,
        arguments=(),
        count=None,
        secret=SECRET,
        patch="",
        enter=(),
        address=None,
        host_id="",
    ):
        """Start a launcher. Ranks with another `host_id` count as being elsewhere."""
        host, port = address or self.address
        place = [f"--nnodes={count or self.count}", f"--node-rank={node}", f"--master-addr={host}"]
        command = [sys.executable, "-c", IMPATIENT.format(patch=patch), "run", *place, f"--master-port={port}"]
        process = subprocess.Popen(
            [*enter, *command, "--start-timeout=20", *options, "-n", str(ranks), program, *arguments],
            env={**os.environ, "RINGCOMM_JOB_SECRET": secret, "RINGCOMM_HOST_ID": host_id},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.launchers.append(process)
        return process

    def start_first_two(self, program):
        """Start nodes 0 and 1, and wait until node 1 has come."""
        launchers = [self.start(node, 1, program, *["--verbose"][node:]) for node in range(2)]
        assert "node 1 (" in launchers[0].stderr.readline()
        return launchers

    def connect(self):
        """Connect to the store as an untrusted peer, once it listens."""
        while True:
            peer = socket.socket()
            peer.settimeout(pools.OPERATION)
            if peer.connect_ex(self.address) == 0 and peer.getsockname() != peer.getpeername():
                return peer
            peer.close()

    def close(self):
        for launcher in self.launchers:
            launcher.kill()
            launcher.communicate()
        self.reserved.close()


def finish(launcher):
    """Return the exit status, the sorted lines of stdout, and stderr."""
    out, err = launcher.communicate(timeout=pools.JOB)
    return launcher.returncode, sorted(out.splitlines()), err
