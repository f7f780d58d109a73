"""Tensors in memory of ringcomm's allocator, on the emulated GPU. What torch does in C++ with CUDA is played here.

Played are the pool, which takes segments through the functions that torch's own CUDAPluggableAllocator has found, and
torch.empty in it.
"""

import ctypes
import datetime
import gc
from contextlib import contextmanager
from types import SimpleNamespace

import device_tensors
import numpy as np
import pytest
import torch
import torch.distributed as dist
from device_tensors import DeviceTensor, on_device
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp

import ringcomm.torch
from harness.leftovers import SEGMENTS
from ringcomm import ArgumentError
from ringcomm.devices import emulated
from ringcomm.devices.gpu import DeviceMemory
from ringcomm.torch import memory

SEGMENT = 2 << 20
GPU = torch.device("cuda", 0)
ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class Pool:
    """A torch.cuda.MemPool whose segments are filled from their beginning."""

    active = None

    def __init__(self, allocator):
        self._allocate = ALLOCATE(allocator.functions[0])
        self.segments, self._used = [], SEGMENT

    def take(self, size):
        if self._used + size > SEGMENT:
            self.segments.append(self._allocate(SEGMENT, 0, None))
            SEGMENTS.add(self.segments[-1])
            self._used = 0
        self._used += size
        return self.segments[-1] + self._used - size

    def snapshot(self):
        return [{"address": address, "device": 0} for address in self.segments]


@contextmanager
def use_mem_pool(pool, device=None):
    assert device == GPU
    Pool.active = pool
    try:
        yield
    finally:
        Pool.active = None


def empty(*shape, dtype=torch.float32, device=None, real=torch.empty):
    if device is None or torch.device(device).type != "cuda":
        return real(*shape, dtype=dtype, device=device)
    like = real(*shape, dtype=dtype, device="meta")
    address = Pool.active.take(like.nbytes)
    data = np.asarray(emulated.device.array(DeviceMemory(address), (like.nbytes,), "uint8"))
    return torch.from_numpy(data).view(dtype).view(like.shape).as_subclass(DeviceTensor)


@pytest.fixture(autouse=True)
def group(monkeypatch, tmp_path):
    """A group of this process alone, on a torch with CUDA."""
    device_tensors.install(monkeypatch)
    custom = lambda *functions: SimpleNamespace(functions=functions)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", custom, raising=False)
    monkeypatch.setattr(torch.cuda.memory._CUDAAllocator, "allocator", lambda self: self._allocator)
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(memory, "_gpu", lambda _: emulated.device)
    monkeypatch.setitem(dist.distributed_c10d.Backend.backend_capability, "ringcomm", ["cpu", "cuda"])
    memory._allocator.cache_clear()
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("ringcomm", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timeout)
    yield dist.group.WORLD
    dist.destroy_process_group()
    memory._allocator.cache_clear()


def is_symmetric(group, x):
    rows = group.comm._router._group._buffers.segments.rows()
    return any(row.begin <= x.data_ptr() < row.begin + row.size for row in rows)


def test_tensors_of_a_block_are_symmetric(group):
    with ringcomm.torch.symmetric_memory():
        x, y = torch.empty(100, device=GPU), torch.empty(1 << 18, device=GPU)
    assert x.fill_(3).sum() == 300
    assert is_symmetric(group, x)
    assert is_symmetric(group, y)
    assert not is_symmetric(group, torch.ones(1))
    dist.all_reduce(x)
    emulated.device.stream().synchronize()
    assert x.sum() == 300
    with ringcomm.torch.symmetric_memory():
        assert torch.empty(100, device=GPU).data_ptr() == y.data_ptr() + y.nbytes  # the same segment


def test_fsdp_takes_its_buffers_from_the_group(group):
    x = fsdp.ProcessGroupAllocAllGather(group).allocate((3, 5), dtype=torch.bfloat16, device=GPU)
    assert (x.numel(), x.dtype) == (15, torch.bfloat16)
    assert is_symmetric(group, x)
    assert not group.supports_tensor_alloc(torch.device("cpu"))
    assert fsdp.ProcessGroupAllocAllGather(group).allocate((3,), dtype=torch.int8, device=torch.device("cpu")).is_cpu
    assert group.allocate_tensor(0, torch.int8, torch.device("cuda")).numel() == 0


def test_a_pool_of_the_program_is_registered_as_with_nccl(group):
    backend = group._get_backend(GPU)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool, GPU):
        x = torch.empty(7, device=GPU)
    dist.all_reduce(x)
    assert not is_symmetric(group, x)
    backend.register_mem_pool(pool)
    assert is_symmetric(group, x)
    backend.deregister_mem_pool(pool)


def test_a_tensor_over_an_array_of_empty_is_symmetric_and_keeps_the_buffer(group):
    x = group.comm.empty(100, "float32", device="emulated")
    tensor = on_device(torch.from_dlpack(x))
    (buffer,) = group.comm._router._group._buffers.own()
    assert buffer.memory.address == tensor.data_ptr()  # by which the core finds it
    del x
    gc.collect()
    assert buffer.used
    dist.all_reduce(tensor.fill_(2))
    emulated.device.stream().synchronize()
    assert torch.Tensor(tensor).sum() == 200
    del tensor
    gc.collect()
    assert not buffer.used


def test_memory_that_cannot_be_symmetric_is_refused(group, monkeypatch):
    segment = {"address": 4096, "device": 0}
    pool = SimpleNamespace(snapshot=lambda: [segment])
    with pytest.raises(
        ArgumentError, match="memory: expected a segment of ringcomm's allocator on emulated, got other"
    ):
        group.register_mem_pool(pool)
    segment["device"] = 3
    with pytest.raises(
        ArgumentError, match="pool: expected memory of the current GPU, cuda:0, got a segment of cuda:3"
    ):
        group.register_mem_pool(pool)
    with pytest.raises(ArgumentError, match=r"device: expected a GPU of this host, in a torch with CUDA, got cpu"):
        group.allocate_tensor(4, torch.float32, torch.device("cpu"))
    monkeypatch.delattr(torch._C, "_cuda_customAllocator")
    memory._allocator.cache_clear()
    assert not group.supports_tensor_alloc(GPU)
    with pytest.raises(ArgumentError, match="needs a torch with CUDA, got 2"):
        group.mem_allocator  # noqa: B018


def test_without_a_gpu_it_is_refused(group, monkeypatch):
    def current_device():
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    with (
        pytest.raises(ArgumentError, match=r"device: expected a GPU that torch can use, got none \(Torch not compiled"),
        ringcomm.torch.symmetric_memory(),
    ):
        pass
    assert group.size() == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (dist.GroupMember.NON_GROUP_MEMBER, "expected one with this rank, got one without it"),
        ("default", "expected a process group, or None for the default one, got 'default'"),
    ],
)
def test_what_is_no_group_of_this_rank_is_refused(given, text):
    for block in (ringcomm.torch.symmetric_memory, ringcomm.torch.shared_arrays):
        with pytest.raises(ArgumentError, match=f"group of {block.__name__}: {text}"), block(given):
            pass
