"""What users of NCCL call on tensors of GPUs, on the emulated one: coalesced calls, timeouts, aborts."""

from contextlib import contextmanager
from datetime import timedelta

import device_tensors
import pytest
import torch
import torch.distributed as dist
from device_tensors import on_device

from harness import torch_world
from harness.failures import until
from ringcomm import Aborted, CollectiveTimeout
from ringcomm.devices import emulated
from ringcomm.torch import coalescing
from ringcomm.torch.tensors import CallTensors

SHORT = 0.3  # seconds, of a wait that times out


@contextmanager
def gpus():
    """Use tensors on the emulated GPU, which are connected."""

    def on_this_device(call, tensors, real=CallTensors.all_inout):  # what torch makes of such tensors is on the CPU
        return on_device(real(call, tensors))

    with pytest.MonkeyPatch.context() as patch:
        device_tensors.install(patch)
        patch.setattr(CallTensors, "all_inout", on_this_device)
        x = on_device(torch.ones(1))
        dist.all_reduce(x)
        synchronize()
        yield


def synchronize():
    emulated.device.stream().synchronize()


def launches(call):
    """Return how many kernels a call has launched."""
    before = emulated.calls().launches
    call()
    synchronize()
    return emulated.calls().launches - before


def coalesced(tensors, **options):
    with dist._coalescing_manager(async_ops=True, **options) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    for work in manager.works:  # the copies back, of torch, are on the CPU here, and wait for no stream
        until(work.is_completed, "the end of the kernel")
    manager.wait()


@torch_world.on(2)
def test_small_all_reduces_of_a_coalescing_manager_are_one_launch():
    with gpus():
        for shapes in ([(3,), (2, 5), (1,), (0,)], [(7,)]):
            tensors = [on_device(torch.full(shape, 1.0 + dist.get_rank())) for shape in shapes]
            assert launches(lambda tensors=tensors: coalesced(tensors)) == 1
            assert all(bool((torch.Tensor(tensor) == 3).all()) for tensor in tensors)
        whole = on_device(torch.ones(6))
        parts = [on_device(part) for part in torch.Tensor(whole).split(2)]  # adjacent: nothing is copied
        assert launches(lambda: coalesced(parts)) == 1
        assert torch.Tensor(whole).tolist() == [2.0] * 6


@torch_world.on(2)
def test_other_coalesced_calls_are_launched_each():
    with gpus(), pytest.MonkeyPatch.context() as patch:
        tensors = [on_device(torch.ones(4)), on_device(torch.ones(3, dtype=torch.int64))]
        assert launches(lambda: coalesced(tensors)) == 2
        patch.setattr(coalescing, "COALESCED_BYTES", 31)
        tensors = [on_device(torch.ones(4)), on_device(torch.ones(4))]
        assert launches(lambda: coalesced(tensors)) == 2


def exchange(world):
    """Send to the next rank and receive from the one before, twice, in one batch."""
    rank, size = dist.get_rank(), world
    sent = [on_device(torch.full((5,), float(10 * rank + k))) for k in range(2)]
    received = [on_device(torch.zeros(5)) for _ in range(2)]
    before, after = (rank - 1) % size, (rank + 1) % size
    operations = [dist.P2POp(dist.isend, tensor, after) for tensor in sent]
    operations += [dist.P2POp(dist.irecv, tensor, before) for tensor in received]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    synchronize()
    return [torch.Tensor(tensor)[0].item() - 10 * before for tensor in received]


@torch_world.on(2)
def test_a_batch_of_messages_arrives():
    with gpus():
        assert exchange(2) == [0.0, 1.0]
        assert exchange(2) == [0.0, 1.0]


def call_alone(aborted):
    x = on_device(torch.ones(4))
    work = dist.all_reduce(x, async_op=True)
    if aborted:
        dist.group.WORLD.abort()
    work.wait()  # waits for no kernel
    until(work.is_completed, "the end of the kernel")
    dist.all_reduce(x)


@pytest.mark.parametrize("raised", [Aborted, CollectiveTimeout])
@torch_world.on(2)
def test_a_running_kernel_ends_by_an_abort_or_by_the_timeout_that_was_set(raised):
    with gpus():
        if raised is CollectiveTimeout:
            dist.group.WORLD.set_timeout(timedelta(seconds=SHORT))
        if dist.get_rank() == 0:
            with pytest.raises(raised):
                call_alone(raised is Aborted)
        else:
            with pytest.raises(raised):
                dist.recv(torch.ones(1), 0)
