"""How tests run code in groups of torch.distributed: on the warm processes of pools.py, with any backend."""

import inspect
import os
import sys
import tempfile
from datetime import timedelta
from functools import wraps

import pytest

from harness import pools
from ringcomm.torch.compat import native

# torch 2.14 calls a group through C++, and wraps its handles.
called_directly = pytest.mark.skipif(native.PYTHON_BACKENDS, reason="torch 2.14 does not forward what this asks for")
through_cpp = pytest.mark.skipif(not native.PYTHON_BACKENDS, reason="torch 2.14 has brought what this calls")

BACKENDS = ("ringcomm", "gloo")


def on(*sizes, backends=("ringcomm",)):
    """Make a test of a function that each rank of a group runs, for groups of these sizes.

    On backends other than the first one, for a group of the largest size only.
    """
    worlds = [(size, backends[0]) for size in sizes] + [(max(sizes), backend) for backend in backends[1:]]

    def start(test, place, args):
        run(test, place["size"], *args, backend=place["backend"])

    def test_of(fn):
        test = pools.made_test(fn, ("size", "backend"), start, first=0)
        names = [f"{backend}-{size}" for size, backend in worlds]
        return pytest.mark.parametrize(("size", "backend"), worlds, ids=names)(test)

    return test_of


def each(names, values):
    """Make a function of a rank run once for each of the values, in one group: below `on`, for short cases.

    An error names the values. `names` is one name, or several with commas, as in pytest.mark.parametrize.
    """
    assert values
    chosen = names.replace(",", " ").split()

    def all_of(fn):
        parameters = inspect.signature(fn).parameters
        rest = [parameter for name, parameter in parameters.items() if name not in chosen]

        @wraps(fn)
        def every(*given, **named):
            given = {parameter.name: value for parameter, value in zip(rest, given, strict=False)} | named
            for value in values:
                case = dict(zip(chosen, value if len(chosen) > 1 else [value], strict=True))
                try:
                    fn(**given, **case)
                except BaseException as error:
                    error.add_note(f"with {case}")
                    raise

        every.__signature__ = inspect.Signature(rest)
        return every

    return all_of


def run(fn, size, *args, backend="ringcomm", timeout=pools.OPERATION):
    """Call `fn(*args)` on each rank, inside a default group, and return the results in rank order."""
    return pools.run(within, size, backend, timeout, fn, args)


def within(comm, backend, timeout, fn, args):
    import torch
    import torch.distributed as dist

    import ringcomm.torch  # noqa: F401

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limits = {"timeout": timedelta(seconds=timeout)}
    dist.init_process_group(backend, store=shared_store(comm), rank=comm.rank, world_size=comm.size, **limits)
    if backend == "gloo":
        dist.barrier()  # a rank that leaves while others still connect would fail them
    try:
        return on_rank(fn)(*args)
    finally:
        dist.destroy_process_group()
        forget_meshes()


def forget_meshes():
    """Empty the cache of DTensor: it knows meshes by their ranks, and would answer with one of a group that is gone."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def on_rank(fn):
    """Return the function that a test made by `on` runs on each rank, or `fn` itself."""
    return getattr(fn, "on_rank", fn)


def shared_store(comm):
    """Return a store at a file, for a TCPStore now and then takes five seconds to be connected."""
    from torch.distributed import FileStore

    path = comm.broadcast_object(comm.rank == 0 and tempfile.mktemp(prefix="store-"))
    return FileStore(path, comm.size)
