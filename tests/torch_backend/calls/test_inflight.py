"""Calls that still run when a compiled graph takes their outputs: allow_inflight_collective_as_graph_input_ctx."""

import torch
import torch.distributed as dist
from test_operations import me, value, values
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

from harness import torch_world
from harness.failures import until_waiting
from ringcomm.torch.shared import communicator_of

registered = torch._C._distributed_c10d._get_work_registry_size


def squared(y):
    y = torch.ops._c10d_functional.wait_tensor(y)
    return y * y


def late_call():
    rank, _ = me()
    graph = torch.compile(squared, backend="eager")
    graph(torch.ones(5))  # compiles it
    if rank == 1:
        until_waiting(communicator_of(), 0)
    y = value(rank, 5)
    with allow_inflight_collective_as_graph_input_ctx():
        work = dist.all_reduce(y, async_op=True)
        result = graph(y)
        assert registered() == 0
        work.wait()
    torch._dynamo.reset()
    assert result.tolist() == (sum(values(5)) ** 2).tolist()


def test_a_compiled_graph_waits_for_a_call_made_outside_of_it():
    torch_world.run(late_call, 2, timeout=60)


def calls():
    """Return the arguments of each call by its name; a tensor comes from no other call."""
    rank, size = me()
    one, all_ranks = (lambda: value(rank, 4)), (lambda: [value(rank, 4) for _ in range(size)])
    at_root = lambda: all_ranks() if rank == 0 else None  # noqa: E731
    return {
        "all_reduce": [one()],
        "reduce": [one(), 0],
        "broadcast": [one(), 0],
        "all_gather": [all_ranks(), one()],
        "all_gather_into_tensor": [value(rank, 4 * size), one()],
        "gather": [one(), at_root(), 0],
        "scatter": [one(), at_root(), 0],
        "reduce_scatter": [one(), all_ranks()],
        "reduce_scatter_tensor": [one(), value(rank, 4 * size)],
        "all_to_all": [all_ranks(), all_ranks()],
        "all_to_all_single": [value(rank, 4 * size), value(rank, 4 * size)],
    }


@torch_world.on(2)
def test_each_call_is_registered_for_each_output_until_it_is_waited_for():
    rank, size = me()
    with allow_inflight_collective_as_graph_input_ctx():
        for name, arguments in calls().items():
            outputs = arguments[1 if name == "gather" else 0]
            work = getattr(dist, name)(*arguments, async_op=True)
            assert registered() == (1 if isinstance(outputs, torch.Tensor) else len(outputs or ())), name
            work.wait()
            assert registered() == 0, name
        for name in ("all_reduce", "all_gather"):
            getattr(dist, name)(*calls()[name])
            assert registered() == 0, name
        x = torch.ones(3)
        work = dist.isend(x, size - 1) if rank == 0 else dist.irecv(x, 0)
        assert registered() == 1
        work.wait()
        assert registered() == 0


@torch_world.on(2)
def test_a_wait_leaves_the_other_calls_of_a_tensor_registered():
    rank, _ = me()
    x = torch.stack([value(rank, 3), value(rank, 3)])
    with allow_inflight_collective_as_graph_input_ctx():
        first, second = (dist.all_reduce(row, async_op=True) for row in x)
        first.wait()
        assert registered() == 1
        torch.ops._c10d_functional.wait_tensor(x[1])
        assert registered() == 0
        second.wait()
    assert torch.equal(x[1], sum(values(3)))


@torch_world.on(2)
def test_many_calls_in_one_write_each_result_once():
    rank, _ = me()
    x = torch.zeros(2, 2).t()  # in no order that a call takes, so that results are written back
    x += rank + 1
    with allow_inflight_collective_as_graph_input_ctx():
        work = dist.group.WORLD.allreduce_coalesced([x, torch.ones(3)])
        torch.ops._c10d_functional.wait_tensor(x)
        x += 10
        work.wait()
        assert registered() == 0
    assert x.tolist() == [[13.0] * 2] * 2
