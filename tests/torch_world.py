"""How tests run code in groups of torch.distributed: on the warm processes of harness.py, with any backend."""

import os
import tempfile
from datetime import timedelta

import harness


def run(fn, size, *args, backend="ringcomm", timeout=harness.OPERATION):
    """Call `fn(*args)` on each rank, inside a default group, and return the results in rank order."""
    return harness.run(within, size, backend, timeout, fn, args)


def within(comm, backend, timeout, fn, args):
    import torch
    import torch.distributed as dist

    import ringcomm.torch  # noqa: F401

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limits = {"timeout": timedelta(seconds=timeout)}
    dist.init_process_group(backend, store=shared_store(comm), rank=comm.rank, world_size=comm.size, **limits)
    try:
        return fn(*args)
    finally:
        dist.destroy_process_group()


def shared_store(comm):
    """Return a store at a file, for a TCPStore now and then takes five seconds to be connected."""
    from torch.distributed import FileStore

    path = comm.broadcast_object(comm.rank == 0 and tempfile.mktemp(prefix="store-"))
    return FileStore(path, comm.size)
