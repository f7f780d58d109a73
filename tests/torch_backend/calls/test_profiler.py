"""What torch's tools see of the calls: torch.profiler and CommDebugMode, with Gloo's names, shapes and counts."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness import torch_world


def ones(*shape):
    return torch.ones(*shape)


def peer():
    return 1 - dist.get_rank()


def coalesced():
    with dist._coalescing_manager(async_ops=True) as manager:
        for count in (2, 3):
            dist.all_reduce(ones(count))
    manager.wait()


def batched():
    operations = [dist.P2POp(dist.isend, ones(3), peer()), dist.P2POp(dist.irecv, ones(3), peer())]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def on_root(*tensors):
    return list(tensors) if dist.get_rank() == 0 else None


def message(asynchronous, source):
    if dist.get_rank() == 0:
        return (dist.isend if asynchronous else dist.send)(ones(7), 1)
    work = (dist.irecv if asynchronous else dist.recv)(ones(7), source)
    return work if asynchronous else None  # recv returns a rank


CALLS = {
    "all_reduce": lambda a: dist.all_reduce(ones(3, 2), async_op=a),
    "all_reduce of a sparse tensor": lambda a: dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (4,)), async_op=a),
    "all_reduce_coalesced": lambda a: dist.all_reduce_coalesced([ones(3), ones(4)], async_op=a),
    "broadcast": lambda a: dist.broadcast(ones(5), 0, async_op=a),
    "reduce": lambda a: dist.reduce(ones(5), 0, async_op=a),
    "all_gather": lambda a: dist.all_gather([ones(2, 3), ones(2, 3)], ones(2, 3), async_op=a),
    "all_gather_into_tensor": lambda a: dist.all_gather_into_tensor(ones(4), ones(2), async_op=a),
    "gather": lambda a: dist.gather(ones(2), on_root(ones(2), ones(2)), async_op=a),
    "scatter": lambda a: dist.scatter(ones(2), on_root(ones(2), ones(2)), async_op=a),
    "reduce_scatter": lambda a: dist.reduce_scatter(ones(2), [ones(2), ones(2)], async_op=a),
    "reduce_scatter_tensor": lambda a: dist.reduce_scatter_tensor(ones(2), ones(4), async_op=a),
    "all_to_all": lambda a: dist.all_to_all([ones(2), ones(2)], [ones(2), ones(2)], async_op=a),
    "all_to_all_single": lambda a: dist.all_to_all_single(ones(4), ones(4), async_op=a),
    "barrier": lambda a: dist.barrier(async_op=a),
    "message": lambda a: message(a, 0),
    "message from any rank": lambda a: message(a, None),
    "batched messages": lambda _: batched(),
    "coalesced calls": lambda _: coalesced(),
    "objects": lambda _: dist.all_gather_object([None, None], "text"),
    "functional": lambda _: (functional.all_reduce(ones(3), "sum", dist.group.WORLD) + 1) is None,
}
SCATTERS = {  # Gloo makes them of all_reduce
    "reduce_scatter": [("reduce_scatter", [[2], [2]])],
    "reduce_scatter_tensor": [("reduce_scatter", [[4]])],
}


def made(name, asynchronous, tool):
    """Make a call while a tool of torch watches."""
    dist.barrier()
    with tool:
        work = CALLS[name](asynchronous)
        if asynchronous and work:
            work.wait()
    return tool


def events(backend):
    found = {}
    for name in CALLS:
        for asynchronous in (False, True):
            tool = made(name, asynchronous, torch.autograd.profiler.profile(record_shapes=True))
            mine = [event for event in tool.function_events if event.name.startswith(f"{backend}:")]
            found[name, asynchronous] = [(event.name.partition(":")[2], event.input_shapes) for event in mine]
    return found


def test_the_profiler_shows_each_call_once_with_the_name_and_the_shapes_of_gloo():
    mine, gloo = (torch_world.run(events, 2, backend, backend=backend) for backend in torch_world.BACKENDS)
    for rank in range(2):
        for (name, asynchronous), expected in gloo[rank].items():
            assert mine[rank][name, asynchronous] == SCATTERS.get(name, expected), (name, asynchronous, rank)


def counts():
    calls = [(name, asynchronous) for name in CALLS for asynchronous in (False, True)]
    tools = {call: made(*call, CommDebugMode()) for call in calls}
    return {call: {str(op): count for op, count in tool.get_comm_counts().items()} for call, tool in tools.items()}


def test_comm_debug_mode_counts_the_calls_as_on_gloo():
    mine, gloo = (torch_world.run(counts, 2, backend=backend) for backend in torch_world.BACKENDS)
    assert mine == gloo
    assert mine[0]["all_reduce", True] == {"c10d.allreduce_": 1}


@torch_world.on(2)
def test_a_mode_changes_no_result():
    with CommDebugMode():
        outputs = [torch.empty(3), torch.empty(3)]
        dist.all_gather(outputs, torch.full((3,), float(dist.get_rank())))
        x = ones(4)
        dist.all_reduce(x)
    assert [output.tolist() for output in outputs] == [[0.0] * 3, [1.0] * 3]
    assert x.tolist() == [2.0] * 4


@torch_world.on(2)
def test_a_call_that_is_refused_leaves_the_profiler_in_order():
    with torch.autograd.profiler.profile() as profile:
        with pytest.raises(ValueError, match="expected a tensor for each of 2 ranks"):
            dist.all_gather([ones(1)], ones(1))
        dist.all_reduce(ones(1))
    names = [event.name for event in profile.function_events if event.name.startswith("ringcomm:")]
    assert names == ["ringcomm:all_gather", "ringcomm:all_reduce"]


class Refusing(TorchDispatchMode):
    """A mode that allows no communication."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            raise RuntimeError(f"no {func} here")
        return func(*args, **(kwargs or {}))


@torch_world.on(2, backends=torch_world.BACKENDS)
def test_a_mode_may_refuse_a_call():
    x = ones(2)
    with Refusing(), pytest.raises(RuntimeError, match=r"no c10d\.allreduce_"):
        dist.all_reduce(x)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 2


@torch_world.on(2)
def test_wrong_arguments_are_refused_under_a_mode_too():
    group = dist.group.WORLD
    with CommDebugMode():
        with pytest.raises(ValueError, match="expected a tensor for each of 2 ranks"):
            group.allgather([[]], [ones(1)])
        with pytest.raises(ValueError, match="expected one of each rank"):
            group.allgather([], [ones(1)])
    dist.barrier()
