"""The backend of torch.distributed: objects, coalesced and asynchronous calls, and groups."""

import inspect
import itertools
import threading

import pytest
import test_operations
import torch
import torch.distributed as dist
from test_operations import me, same, value, values
from torch.distributed.distributed_c10d import _coalescing_manager

from harness import torch_world
from harness.failures import raised, until
from ringcomm import ArgumentError, RingcommError
from ringcomm.callbacks import inside_callback
from ringcomm.work import StartedWork

# --- Objects, barriers, coalesced calls -------------------------------------------------------------------------------


@torch_world.on(1, 2, 4)
def test_objects_and_barriers():
    rank, size = me()
    things = [{"from": r, "data": list(range(r * 1000))} for r in range(size)]
    seen = [None] * size
    dist.all_gather_object(seen, things[rank])
    assert seen == things
    seen = [None] * size if rank == 0 else None
    dist.gather_object(things[rank], seen)
    assert seen == (things if rank == 0 else None)
    shared = [things[-1], "b"] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(shared, size - 1)
    assert shared == [things[-1], "b"]
    mine = [None]
    dist.scatter_object_list(mine, things if rank == 0 else None)
    assert mine == [things[rank]]
    if size > 1:
        message = ["hello", rank]
        if rank == 0:
            dist.send_object_list(message, 1)
        elif rank == 1:
            dist.recv_object_list(message, 0)
            assert message == ["hello", 0]
    dist.barrier()
    dist.barrier(async_op=True).wait()


@torch_world.on(1, 2, 4)
def test_coalesced_calls():
    rank, size = me()
    xs = [value(rank, n) for n in (1, 3, 1000)]
    with _coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    for x in xs:
        same(x, sum(values(*x.shape)))
    with _coalescing_manager():
        outs = [torch.empty(size * n) for n in (1, 4)]
        for out, n in zip(outs, (1, 4), strict=True):
            dist.all_gather_into_tensor(out, value(rank, n))
    for out, n in zip(outs, (1, 4), strict=True):
        same(out, torch.cat(values(n)))
    with _coalescing_manager():
        outs = [torch.empty(n) for n in (1, 4)]
        for out, n in zip(outs, (1, 4), strict=True):
            dist.reduce_scatter_tensor(out, torch.cat([value(rank, n)] * size))
    for out, n in zip(outs, (1, 4), strict=True):
        same(out, sum(values(n)))
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        broadcast = value(rank, 3)
        dist.broadcast(broadcast, 0, async_op=True)
    manager.wait()
    same(broadcast, value(0, 3))
    group = dist.group.WORLD
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    group.allgather_coalesced(lists, [value(rank, 2), value(rank, 3)]).wait()
    for r, (two, three) in enumerate(lists):
        same(two, value(r, 2))
        same(three, value(r, 3))
    text = str(raised(ArgumentError, lambda: group.allgather_coalesced(lists, [value(rank, 2)])))
    assert "the lists: expected 1 tensors each, as inputs, got" in text
    assert "in the torch.distributed group" in text


@torch_world.on(2, backends=torch_world.BACKENDS)
def test_coalesced_calls_read_what_was_there_before_the_first():
    rank, size = me()
    group = dist.group.WORLD
    total = sum(values(6))
    x = value(rank, 6)
    group.allreduce_coalesced([x, x]).wait()
    same(x, total)
    for async_op in (False, True):
        x = value(rank, 6)
        with _coalescing_manager(async_ops=async_op) as manager:
            dist.all_reduce(x[:4])
            dist.all_reduce(x[2:])
        if async_op:
            manager.wait()
        same(x, total)
    x = value(rank, 12)
    out = torch.empty(size)
    group.allgather_into_tensor_coalesced([x[:size], out], [x[4:5], x[:1]]).wait()
    same(x[:size], torch.stack([value(r, 12)[4] for r in range(size)]))
    same(out, torch.stack([value(r, 12)[0] for r in range(size)]))
    x = value(rank, 12)
    out = torch.empty(1)
    group.reduce_scatter_tensor_coalesced([x[:1], out], [x[4 : 4 + size], x[:size]]).wait()
    whole = sum(values(12))
    same(x[:1], whole[4 + rank : 5 + rank])
    same(out, whole[rank : rank + 1])
    x = value(rank, 12)
    lists = [[x[r : r + 1], torch.empty(1)] for r in range(size)]
    group.allgather_coalesced(lists, [x[4:5], x[:1]]).wait()
    for r, (first, second) in enumerate(lists):
        same(first, value(r, 12)[4:5])
        same(second, value(r, 12)[:1])


@torch_world.on(2, backends=torch_world.BACKENDS)
def test_several_tensors_of_a_rank_become_one():
    rank, _ = me()
    group, c10d = dist.group.WORLD, dist.distributed_c10d
    for op, total in ((dist.ReduceOp.SUM, 11 * sum(values(3))), (dist.ReduceOp.MAX, 10 * value(1, 3))):
        tensors = [value(rank, 3), 10 * value(rank, 3)]
        options = c10d.AllreduceOptions()
        options.reduceOp = op
        group.allreduce(tensors, options).wait()
        for x in tensors:
            same(x, total)
    tensors = [value(rank, 3), 10 * value(rank, 3)]
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 1
    group.broadcast(tensors, options).wait()
    for x in tensors:
        same(x, 10 * value(1, 3))


@torch_world.on(2, backends=torch_world.BACKENDS)
def test_empty_lists_are_refused():
    group = dist.group.WORLD
    of_one = ("allreduce", "allreduce_coalesced", "broadcast")
    of_two = ("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
    for name, arguments in [*((name, [[]]) for name in of_one), *((name, [[], []]) for name in (*of_two, "alltoall"))]:
        with pytest.raises(RuntimeError):
            getattr(group, name)(*arguments)
    with _coalescing_manager():
        pass
    dist.barrier()


@torch_world.called_directly
@torch_world.on(2)
def test_methods_take_tensors_and_options_by_position_or_name():
    group, (rank, size) = dist.group.WORLD, me()
    assert [*inspect.signature(group.allreduce).parameters] == ["tensors", "opts"]
    assert [*inspect.signature(group.send).parameters] == ["tensors", "peer", "tag"]
    x, out, options = value(rank, 3), torch.empty(3 * size), dist.distributed_c10d.AllgatherOptions()
    for arguments, named in (((out, x), {}), ((out, x, options), {}), ((out,), {"input": x, "opts": options})):
        group.all_gather_single(*arguments, **named).wait()
        same(out, torch.cat(values(3)))
    for arguments in ((out,), (out, x, options, None)):
        with pytest.raises(TypeError, match="argument"):
            group.all_gather_single(*arguments)


@torch_world.called_directly
@torch_world.on(1, 2, 4)
def test_async_calls_and_their_futures():
    rank, size = me()
    x = value(rank, 100_000)
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    works[-1].wait()
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
    same(x, size**2 * sum(values(100_000)))
    (result,) = works[0].result()
    assert result is x

    work = dist.all_reduce(y := value(rank, 5), async_op=True)
    (got,) = work.get_future().wait()
    same(got, sum(values(5)))
    assert got.data_ptr() == y.data_ptr()
    doubled = dist.all_reduce(y, async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    same(doubled.wait(), 2 * size * sum(values(5)))

    strided = torch.zeros(4, 3).t()
    strided.copy_(value(rank, 3, 4))
    (got,) = dist.all_reduce(strided, async_op=True).get_future().wait()
    same(got.contiguous(), sum(values(3, 4)))
    assert got.data_ptr() == strided.data_ptr()

    work = dist.all_reduce(value(rank, 3), async_op=True)
    for future in (work.get_future(), work.get_future()):
        same(future.wait()[0], sum(values(3)))

    def twice(future):  # as the PowerSGD hook does: it waits for a call inside the callback of another
        inner = dist.all_reduce(future.value()[0], async_op=True).get_future()
        assert inner.done() or not inside_callback()  # before the next callback begins
        return inner.wait()

    chained = dist.all_reduce(value(rank, 3), async_op=True).get_future().then(twice).then(lambda f: f.value()[0])
    same(chained.wait(), size * sum(values(3)))

    large = torch.zeros(1000, 2000).t().add_(rank + 1)
    work = dist.all_reduce(large, async_op=True)
    future = work.get_future()
    while not work.is_completed():
        pass
    assert bool((large == size * (size + 1) / 2).all())  # nothing is still being written
    future.wait()

    with torch.inference_mode():
        outputs = [torch.empty(3) for _ in range(size)]
        work = dist.all_gather(outputs, value(rank, 3), async_op=True)
        work.get_future().wait()
    for got, expected in zip(outputs, values(3), strict=True):
        same(got, expected)

    many = [torch.ones(1) for _ in range(1200)]
    with _coalescing_manager(async_ops=True) as manager:
        for each in many:
            dist.all_reduce(each)
    manager.wait()
    assert len(manager.works[0].get_future().wait()) == len(many)

    futures = [dist.all_reduce(value(rank, 10), async_op=True).get_future() for _ in range(50)]
    for (got,) in torch.futures.wait_all(futures):
        same(got, sum(values(10)))


def in_the_background():
    """Start each call on plain tensors, and yield its handle."""
    rank, size = me()
    x, out = value(rank, size), torch.zeros(size)
    yield dist.all_reduce(x, async_op=True)
    yield dist.broadcast(x, 0, async_op=True)
    yield dist.all_gather_into_tensor(out, x[:1], async_op=True)
    yield dist.all_to_all_single(out, x, async_op=True)
    yield dist.barrier(async_op=True)
    yield dist.isend(x, (rank + 1) % size)
    yield dist.irecv(out, (rank - 1) % size)
    peers = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, out, (rank - 1) % size)]
    yield from dist.batch_isend_irecv(peers)


@torch_world.called_directly
@torch_world.on(1, 2)
def test_the_fast_path_starts_calls_on_plain_tensors():
    dist.all_reduce(torch.zeros(1))  # the first tensor of a process takes the general path
    for handle in in_the_background():
        assert [type(work) for work in handle.works] == [StartedWork]
        handle.wait()
        assert handle.is_completed()


def has_callback_thread():
    return any(thread.name == "ringcomm completions" for thread in threading.enumerate())


@torch_world.on(1, 2)
def test_a_call_whose_future_nobody_asks_for_starts_no_thread_of_python():
    until(lambda: not has_callback_thread(), "the end of a thread that earlier callbacks needed")
    for handle in in_the_background():
        handle.wait()
    assert not has_callback_thread()
    dist.barrier(async_op=True).get_future().wait()
    assert has_callback_thread()


@torch_world.called_directly
@torch_world.on(1, 2)
def test_a_blocking_call_of_many_writes_back_before_it_returns():
    rank, _ = me()
    x = torch.arange(4.0) + rank
    options = dist.distributed_c10d.AllreduceCoalescedOptions()
    options.asyncOp = False
    handle = dist.group.WORLD.allreduce_coalesced([x[:3], x[1:]], options)  # they overlap, so one of them is a copy
    x.fill_(7)
    handle.wait()
    assert x.tolist() == [7.0] * 4


# --- Groups -----------------------------------------------------------------------------------------------------------


@torch_world.on(2, 4)
def test_sub_groups_are_used_side_by_side():
    rank, size = me()
    pairs = [dist.new_group(list(pair)) for pair in itertools.combinations(range(size), 2)]
    members = list(itertools.combinations(range(size), 2))
    works = []
    for group, pair in zip(pairs, members, strict=True):
        if rank in pair:
            x = value(rank, 1000)
            works.append((dist.all_reduce(x, group=group, async_op=True), x, pair))
    for work, x, pair in reversed(works):
        work.wait()
        same(x, sum(value(r, 1000) for r in pair))
    reordered = dist.new_group(list(range(size))[::-1])
    assert dist.get_group_rank(reordered, rank) == dist.get_rank(reordered)
    x = value(rank, 3)
    dist.broadcast(x, 0, group=reordered)
    same(x, value(0, 3))
    dist.destroy_process_group(reordered)

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    x = value(rank, 4)
    dist.all_reduce(x, group=mesh["a"].get_group())
    same(x, value(rank % (size // 2), 4) + value(rank % (size // 2) + size // 2, 4))


@torch_world.on(2)
def test_a_store_may_be_used_again_after_destroy():
    rank, size = me()
    store = dist.distributed_c10d._get_default_store()
    for round_ in range(3):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("ringcomm", store=store, rank=rank, world_size=size)
        x = value(rank, 3)
        dist.all_reduce(x)
        same(x, sum(values(3)))
        if rank < 2:
            group = dist.new_group([0, 1] if round_ % 2 else [1, 0], use_local_synchronization=True)
            dist.barrier(group)
    assert dist.get_backend() == "ringcomm"


@torch_world.on(2, 4)
def test_destroying_a_group_finishes_its_calls():
    rank, _ = me()
    group = dist.new_group()
    xs = [value(rank, 100_000) for _ in range(10)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in xs][::2]  # nobody holds the last one
    dist.destroy_process_group(group)
    for x in xs:
        same(x, sum(values(100_000)))
    assert all(work.is_success() for work in works)
    with pytest.raises(RingcommError, match=r"(?s)this communicator is closed.*in the torch\.distributed group"):
        group.allreduce([torch.ones(1)])


# --- For groups of other kinds: on several hosts, beside another backend ----------------------------------------------

OPERATIONS = (
    test_operations.test_all_reduce_with_every_operation_and_dtype,
    test_operations.test_reduce_broadcast_gather_scatter_from_every_root,
    test_operations.test_all_gather_of_every_kind,
    test_operations.test_lists_may_be_uneven,
    test_operations.test_reduce_scatter_of_lists_and_tensors,
    test_operations.test_all_to_all_of_lists_and_tensors_even_and_not,
    test_operations.test_messages_between_ranks,
    test_objects_and_barriers,
    test_coalesced_calls,
    test_async_calls_and_their_futures,
    test_sub_groups_are_used_side_by_side,
)


@torch_world.each("fn", OPERATIONS)
def every_operation(fn):
    torch_world.on_rank(fn)()
