"""Tensors in symmetric memory: torch allocates them in a pool whose segments the ranks of a group access directly."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.arrays.adapters import ADAPTERS
from ringcomm.communicator import Communicator
from ringcomm.devices.device import Device
from ringcomm.errors import ArgumentError, refuse
from ringcomm.native import LIBRARY
from ringcomm.torch.shared import ringcomm_backend_of
from ringcomm.transports.cuda.segments import open_segments

__all__ = ["TensorMemory", "symmetric_memory"]


@contextmanager
def symmetric_memory(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Let the tensors that torch makes in the block on the current GPU lie in symmetric memory. ::

        with ringcomm.torch.symmetric_memory():
            gradients = torch.empty(1 << 24, device="cuda")

    All ranks of the group run the block, and make the same tensors there: calls on them copy nothing first. A tensor
    without a counterpart is used as any other. This applies to this thread, as torch.cuda.use_mem_pool does, and torch
    keeps the memory for later blocks. `group`: a process group on the backend "ringcomm"; None: the default one.
    """
    backend = ringcomm_backend_of(group, "cuda", "symmetric_memory")
    device = _indexed("cuda")
    pool = backend._pool(device)
    with torch.cuda.use_mem_pool(pool, device):
        yield
    backend.register_mem_pool(pool)


class TensorMemory:
    """What torch asks of a group about memory. The names are those of c10d, and of ProcessGroupNCCL."""

    comm: Communicator
    _pools: dict[torch.device, Any]

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return torch.device(device).type == "cuda" and _has_pools() and self.comm._transport.as_local is not None

    def allocate_tensor(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor in symmetric memory, if all ranks call this alike, as FSDP2 and DDP do."""
        device = _indexed(device)
        if not self.supports_tensor_alloc(device):
            raise refuse("device", "a GPU of this host, in a torch with CUDA", device)
        with torch.cuda.use_mem_pool(self._pool(device), device):
            tensor = torch.empty(size, dtype=dtype, device=device)
        if size:
            self._share(device, [tensor.data_ptr()])
        return tensor

    @property
    def mem_allocator(self) -> Any:
        """The allocator of segments, for a torch.cuda.MemPool."""
        open_segments(_gpu(_indexed("cuda")))
        return _allocator()

    def register_mem_pool(self, pool: Any) -> None:
        """Make the segments of a pool on the current GPU symmetric, once all ranks have called this."""
        device = _indexed("cuda")
        found = pool.snapshot()
        for segment in found:
            if segment["device"] != device.index:
                raise refuse("pool", f"memory of the current GPU, {device}", f"a segment of cuda:{segment['device']}")
        self._share(device, [segment["address"] for segment in found])

    def deregister_mem_pool(self, pool: Any) -> None:
        """Do nothing: a segment stays symmetric as long as the group lives."""

    def _pool(self, device: torch.device) -> Any:
        """Return the pool of a GPU for this group: the ranks of another one may take other segments."""
        if device not in self._pools:
            open_segments(_gpu(device))
            self._pools[device] = torch.cuda.MemPool(_allocator())
        return self._pools[device]

    def _share(self, device: torch.device, addresses: list[int]) -> None:
        self.comm._router.share_segments(_gpu(device), addresses)


def _has_pools() -> bool:
    return hasattr(torch._C, "_cuda_customAllocator")


@cache
def _allocator() -> Any:
    if not _has_pools():
        raise ArgumentError(f"symmetric memory needs a torch with CUDA, got {torch.__version__}")
    functions = "ringcomm_segment_allocate", "ringcomm_segment_free"
    made: Any = torch.cuda.memory.CUDAPluggableAllocator(LIBRARY, *functions)
    return made.allocator()


def _indexed(device: torch.device | str) -> torch.device:
    """Return a device with its number: of "cuda" that of the current GPU."""
    device = torch.device(device)
    if device != torch.device("cuda"):
        return device
    try:
        return torch.device("cuda", torch.cuda.current_device())
    except (AssertionError, RuntimeError) as reason:  # a torch without CUDA, a machine without a GPU
        raise refuse("device", "a GPU that torch can use", f"none ({reason})") from None


@cache
def _gpu(device: torch.device) -> Device:
    pointer, _, _ = ADAPTERS[torch.Tensor].memory(torch.empty(1, device=device), True)
    found: Device = pointer.device
    return found
