"""torch.compile around the collectives of torch.distributed: the same graphs as on Gloo, and the same results."""

import warnings

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from test_operations import me, value

from harness import torch_world


def barrier(x):
    y = x + 1
    dist.barrier()
    return y * 2


def broadcast(x):
    y = x + 1
    dist.broadcast(y, 0)
    return y * 2


def reduce(x):
    y = x + 1
    dist.reduce(y, 0)
    return y * 2 if dist.get_rank() == 0 else x  # Gloo leaves partial sums elsewhere


def gather(x):
    rank, size = me()
    outputs = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
    dist.gather(x + 1, outputs, 0)
    return sum(outputs) if rank == 0 else x * 2


def scatter(x):
    rank, size = me()
    out = torch.empty_like(x)
    dist.scatter(out, [x + r for r in range(size)] if rank == 0 else None, 0)
    return out * 2


def all_reduce(x):
    y = x + 1
    dist.all_reduce(y, group=dist.group.WORLD)
    return y * dist.get_world_size(dist.group.WORLD)


def asynchronous(x):
    y = x + 1
    dist.all_reduce(y, async_op=True).wait()
    return y * 2


def send_and_receive(x):
    y = x + 1
    if dist.get_rank() == 0:
        dist.send(y, 1)
        dist.isend(y, 1).wait()
    else:
        dist.recv(y, 0)
        dist.irecv(y, 0).wait()
    return y * 2


def batched(x):
    rank, size = me()
    out = torch.empty_like(x)
    to, source = (rank + 1) % size, (rank - 1) % size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x + 1, to), dist.P2POp(dist.irecv, out, source)]):
        work.wait()
    return out * 2


def lists(x):
    size = dist.get_world_size()
    gathered, shares, exchanged = ([torch.empty_like(x) for _ in range(size)] for _ in range(3))
    dist.all_gather(gathered, x + 1)
    dist.reduce_scatter(shares[0], [x + r for r in range(size)])
    dist.all_to_all(exchanged, [x + r for r in range(size)])
    return sum(gathered) + shares[0] + sum(exchanged)


def single_tensors(x):
    whole = torch.empty(dist.get_world_size() * len(x))
    dist.all_gather_into_tensor(whole, x + 1)
    share, swapped = torch.empty_like(x), torch.empty_like(whole)
    dist.reduce_scatter_tensor(share, whole * 2)
    dist.all_to_all_single(swapped, whole)
    return share + swapped[: len(x)]


CALLS = (
    *(barrier, broadcast, reduce, gather, scatter, all_reduce),
    *(asynchronous, send_and_receive, batched, lists, single_tensors),
)


def results_and_breaks(functions, compiler):
    """Return the result of each compiled function by its name, and the number of graph breaks in it."""
    rank, _ = me()
    seen = {}
    options = {
        "compile_threads": 1,  # a rank here is a daemon, which may not start processes
        "fallback_by_default": True,  # no kernels of its own, each of which takes seconds to compile
    }
    with torch._inductor.config.patch(options), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of torch's own
        for function in functions:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            expected = function(value(rank, 6))
            got = torch.compile(function, backend=compiler)(value(rank, 6))
            assert torch.equal(got, expected), function.__name__
            breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
            seen[function.__name__] = got.tolist(), breaks
    torch._dynamo.reset()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "compiler"), [(CALLS, "eager"), ((asynchronous, single_tensors), "inductor")], ids=["eager", "inductor"]
)
def test_a_collective_breaks_the_graph_where_it_does_on_gloo_and_has_its_result(calls, compiler):
    ours, theirs = (
        torch_world.run(results_and_breaks, 2, calls, compiler, backend=backend, timeout=120)
        for backend in torch_world.BACKENDS
    )
    assert ours == theirs
