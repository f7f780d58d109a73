"""Pools of ranks that a launcher starts, as mpirun, torchrun or `ringcomm run`: they connect to the tests by a file."""

import socket
import tempfile
import time
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path

from harness import pools
from ringcomm.testing import ranks

PROGRAM = Path(__file__).with_name("rank.py")


class Pool(ranks.Pool):
    """Ranks that wait for work. `start(output, address)` starts them and returns the processes of the launchers."""

    def __init__(self, size, start):
        self.written = tempfile.TemporaryFile("w+")  # noqa: SIM115
        super().__init__([None] * size)
        self.files = set()
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket")  # a file: ranks may be in other network namespaces
            listener.listen(size)
            self.launchers = start(self.written, f"{folder}/socket")
            try:
                deadline = time.monotonic() + pools.OPERATION
                while None in self.connections:
                    self.accept(listener, deadline)
            except BaseException:
                self.kill()
                raise

    def accept(self, listener, deadline):
        if wait([listener], 0.1):
            connection = Connection(listener.accept()[0].detach())
            rank, files = connection.recv()
            self.connections[rank] = connection
            self.files |= files
            return
        missing = [rank for rank, connection in enumerate(self.connections) if not connection]
        assert time.monotonic() < deadline, f"ranks {missing} have not connected: {self.output()}"
        assert all(launcher.poll() is None for launcher in self.launchers), self.output()

    def run(self, fn, args, limit=pools.JOB):
        try:
            return super().run(fn, args, limit)
        except ConnectionError as error:
            error.add_note(self.output())
            raise

    def output(self):
        """Return what the launchers and their ranks have written so far."""
        self.written.seek(0)
        return self.written.read()

    def end(self):
        """Tell the ranks to exit; return the exit status of the first launcher that failed, or 0."""
        for connection in self.connections:
            connection.close()
        statuses = [launcher.wait(pools.OPERATION) for launcher in self.launchers]
        return next(filter(None, statuses), 0)

    def close(self):
        try:
            self.end()
        finally:
            self.kill()

    def kill(self):
        for connection in filter(None, self.connections):
            connection.close()
        for launcher in self.launchers:
            launcher.terminate()  # it then ends its ranks; SIGKILL may leave them running
        for launcher in self.launchers:
            launcher.wait(pools.OPERATION)
        self.written.close()
        for path in self.files:  # MPI_Abort leaves them
            path.unlink(missing_ok=True)


# --- The program of a rank --------------------------------------------------------------------------------------------


def answer(address, rank, world, files=frozenset()):
    """Call `fn(world, *args)` for each (fn, args) that the pool at `address` sends, until it closes.

    The pool removes `files` when it is killed.
    """
    with Client(address) as connection:
        connection.send((rank, files))
        ranks.answer(connection, world)
