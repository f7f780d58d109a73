"""Tensors in memory that all ranks of the machine access."""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ringcomm.communicator import Communicator
from ringcomm.errors import refuse

__all__ = ["communicator_of", "ringcomm_backend_of", "shared_arrays", "shared_empty"]


def shared_arrays(group: dist.ProcessGroup | None = None) -> AbstractContextManager[None]:
    """Return a block in which NumPy's arrays, and tensors that `torch.from_numpy` makes of them, are shared.

    See `Communicator.shared_arrays`. `group`: a process group on the backend "ringcomm"; None: the default one.
    """
    arrays: AbstractContextManager[None] = ringcomm_backend_of(group, "cpu", "shared_arrays").comm.shared_arrays()
    return arrays


def shared_empty(*shape: Any, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return an uninitialized tensor on the CPU, as torch.empty does, in shared memory if it has 64 KiB or more."""
    like = torch.empty(*shape, dtype=dtype, device="meta")
    with shared_arrays(group):
        memory = np.empty(max(like.nbytes, 1), np.uint8)  # an empty one has no stride
    return torch.from_numpy(memory)[: like.nbytes].view(like.dtype).view(like.shape)


def communicator_of(group: dist.ProcessGroup | None = None, device: str = "cpu") -> Communicator | None:
    """Return the communicator that a process group uses for a type of device; None: another backend."""
    comm = getattr(_backend_of(group, device), "comm", None)
    return comm if isinstance(comm, Communicator) else None


def ringcomm_backend_of(group: Any, device: str, caller: str) -> Any:
    """Return ringcomm's backend of a group for a type of device; raise ArgumentError, which names the caller."""
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise refuse(f"group of {caller}", "one with this rank", "one without it, as new_group has returned")
    if not (group is None or isinstance(group, dist.ProcessGroup)):
        raise refuse(f"group of {caller}", "a process group, or None for the default one", repr(group))
    backend = _backend_of(group, device)
    if not isinstance(getattr(backend, "comm", None), Communicator):
        where = "the CPU" if device == "cpu" else "GPUs"
        found = "another backend" if group or dist.is_initialized() else "no default group: call init_process_group"
        raise refuse(f"group of {caller}", f"one whose tensors on {where} use the backend ringcomm", found)
    return backend


def _backend_of(group: dist.ProcessGroup | None, device: str) -> Any:
    """Return what makes the calls of a process group on tensors of a type of device: for ringcomm it has a `comm`."""
    group = dist.group.WORLD if group is None else group
    if group is None or hasattr(group, "comm"):  # before torch 2.14 the group itself is ringcomm's
        return group
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:  # none for the device
        return None
