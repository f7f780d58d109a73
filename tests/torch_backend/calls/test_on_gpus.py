"""Tensors on GPUs, played by the emulated device: what the host waits for, and what streams wait for."""

import datetime
import weakref

import device_tensors
import pytest
import torch
import torch.distributed as dist
from device_tensors import on_device

import ringcomm
from cases.on_device import Gate
from ringcomm.devices import emulated
from ringcomm.transports import routing
from ringcomm.transports.cuda import group, messages

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A group of this process alone: kernels are launched as in any other."""
    device_tensors.install(monkeypatch)
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("ringcomm", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timeout)
    dist.all_reduce(on_device(torch.ones(100)))  # connects
    yield
    dist.destroy_process_group()


@pytest.fixture
def gate(alone):  # noqa: ARG001 (it ends after this one)
    gate = Gate()
    yield gate
    gate.open()


def behind(gate):
    """Return a tensor of ones, and a stream that makes them twos once the gate is open."""
    x, stream = on_device(torch.ones(100)), emulated.Stream()
    gate.hold(stream)
    stream.add(lambda: x.fill_(2))
    return x, stream


def all_are(x, value):
    return bool((torch.Tensor(x) == value).all())


def test_a_blocking_call_is_launched_without_python(monkeypatch):
    x = on_device(torch.ones(100))
    monkeypatch.delattr(group.CudaGroup, "call")
    dist.all_reduce(x)
    emulated.device.stream().synchronize()
    assert all_are(x, 1)


def test_a_wait_makes_the_current_stream_wait_and_not_the_host(gate):
    x, stream = behind(gate)
    with stream:
        work = dist.all_reduce(x, async_op=True)
    with emulated.Stream() as other:
        work.wait()
        other.add(lambda: x.add_(1))  # after the call, which is after the gate
        assert not work.is_completed()
        gate.open()
        other.synchronize()
    assert all_are(x, 3)
    assert work.is_completed()


def test_a_future_is_complete_at_once_and_its_callbacks_wait_on_a_stream(gate):
    x, stream = behind(gate)
    seen = []
    with stream:
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future()
        future.then(lambda done: seen.append(done.value()))
    assert future.done()  # the host waits for nothing
    assert len(seen) == 1
    assert not work.is_completed()
    gate.open()
    work.wait()
    emulated.device.stream().synchronize()
    assert all_are(x, 2)


def test_a_backward_pass_of_ddp_goes_on_while_buckets_are_reduced(gate):
    """torch's own DDP takes no such tensors, so a hook passes its buckets, each of one parameter."""
    model = torch.nn.Sequential(*(torch.nn.Linear(50, 50, bias=False) for _ in range(3)))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-6, gradient_as_bucket_view=True)
    stream, works = emulated.Stream(), []

    def reduce(_, bucket):
        grads = bucket.buffer()
        stream.add(lambda: grads.fill_(2))  # the kernel that makes them
        with stream:
            work = dist.all_reduce(on_device(grads), async_op=True)
        works.append(work)
        return work.get_future().then(lambda done: torch.Tensor(done.value()[0]))

    ddp.register_comm_hook(None, reduce)
    ddp(torch.ones(1, 50)).sum().backward()  # all in one bucket, to learn their order
    stream.synchronize()
    works.clear()
    gate.hold(stream)
    ddp.zero_grad(set_to_none=False)
    ddp(torch.ones(1, 50)).sum().backward()  # would wait for the gate for ever
    assert len(works) > 1
    assert not any(work.is_completed() for work in works)
    assert not any(all_are(parameter.grad, 2) for parameter in model.parameters())
    gate.open()
    for work in works:
        work.wait()
    emulated.device.stream().synchronize()
    assert all(all_are(parameter.grad, 2) for parameter in model.parameters())


def test_a_tensor_that_is_dropped_in_flight_stays_until_its_call_has_ended(gate):
    x, stream = behind(gate)
    alive = weakref.ref(x)
    with stream:
        work = dist.all_reduce(x, async_op=True)
    ended = weakref.ref(work)
    del x, work
    assert ended() is None  # nobody waits for the call
    assert alive() is not None
    gate.open()
    stream.synchronize()


def message_to_itself(x, out):
    group = dist.distributed_c10d._get_default_group()
    works = [group.recv([out], 0, 7), group.send([x], 0, 7)]
    for work in works:
        work.wait()
    assert works[0].source_rank() == 0
    assert works[0].result() == [out]
    emulated.device.stream().synchronize()


def test_a_message_is_started_without_python(monkeypatch):
    x, out = on_device(torch.arange(100)), on_device(torch.zeros(120, dtype=torch.int64))
    message_to_itself(x, out)  # connects
    monkeypatch.delattr(messages.GpuMessages, "start")
    message_to_itself(on_device(torch.arange(100) + 1), out)
    assert torch.Tensor(out).tolist() == [*range(1, 101)] + [0] * 20


def test_a_call_that_is_refused_ends_its_batch(monkeypatch):
    x, switches = on_device(torch.ones(3)), []
    monkeypatch.setattr(routing.ArrayRouter, "coalesce_messages", lambda _, holds: switches.append(holds))
    with pytest.raises(ringcomm.ArgumentError), dist.distributed_c10d._coalescing_manager(device=x.device):
        dist.distributed_c10d._get_default_group().send([x], 7, 0)
    assert switches == [True, False]
    alive = weakref.ref(dist.all_reduce(x, async_op=True))
    emulated.device.stream().synchronize()
    assert alive() is None  # no list of a batch has it
