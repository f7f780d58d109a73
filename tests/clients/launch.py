"""Runs a program on ranks that are forked once its client is imported: the imports take most of the time.

`python launch.py PROGRAM SIZE BACKEND…` calls `run(backend, size)` of a file of programs/ on each rank, on one backend
after another, in the environment that torchrun makes.
"""

import importlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path

from torch.distributed import TCPStore
from torch.multiprocessing import start_processes


def main(name, size, *backends):
    sys.path.insert(0, str(Path(__file__).with_name("programs")))
    program = importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    for backend in backends:
        port, sender = fork.Pipe(duplex=False)
        store = fork.Process(target=serve_store, args=(sender,))  # its threads must not be here when ranks are forked
        store.start()
        sender.close()  # here: if the store ends, receiving fails
        try:
            arguments = program.run, backend, int(size), port.recv()
            start_processes(on_rank, arguments, int(size), start_method="fork")
        finally:
            store.kill()


def serve_store(sender):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sender.send(store.port)
    signal.pause()


def on_rank(rank, run, backend, size, port):
    import tiny

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "clients",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    tiny.finish(backend, run(backend, size))


if __name__ == "__main__":
    main(*sys.argv[1:])
