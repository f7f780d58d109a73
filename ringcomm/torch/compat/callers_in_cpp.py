"""What torch does in C++ with the Backend of a group, or with the value of a future, done in Python.

A future made in Python holds an object, where FP16_COMPRESS looks for tensors. Before torch 2.14 the group is an object
of Python, in which the out variant of all_gather finds no Backend; inductor's buckets consist of its calls.
"""

from functools import cache, wraps
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ringcomm.torch import observers
from ringcomm.torch.compat import native
from ringcomm.torch.shared import communicator_of

__all__ = ["serve"]

c10d: Any = torch._C._distributed_c10d
_kernels: list[Any] = []  # torch forgets those of a library that is gone


@cache  # once
def serve() -> None:
    """Let these callers reach the groups of this process, unless the extension does."""
    if native.extension():
        return
    _serve_builtin_hooks()
    if not native.PYTHON_BACKENDS:
        library: Any = torch.library.Library
        _kernels.append(library("_c10d_functional", "IMPL"))
        for device in ("CPU", "CUDA"):
            _kernels[-1].impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, device)


def _serve_builtin_hooks() -> None:
    """Make FP16_COMPRESS the hook in Python that does the same."""
    ddp: Any = DistributedDataParallel
    theirs = ddp._register_builtin_comm_hook

    @wraps(theirs)
    def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        compresses = comm_hook_type == c10d.BuiltinCommHookType.FP16_COMPRESS
        if compresses and communicator_of(self.process_group, self.device_type):
            self.register_comm_hook(self.process_group, fp16_compress_hook)
        else:
            theirs(self, comm_hook_type)

    ddp._register_builtin_comm_hook = _register_builtin_comm_hook


def _all_gather_into_tensor_out(
    input: torch.Tensor,
    group_size: int,  # noqa: ARG001 (of the operator)
    group_name: str,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Do what the operator does, on any backend."""
    group = c10d._resolve_process_group(group_name)
    start = getattr(group, "all_gather_single", None) or getattr(group, observers.OLDER["all_gather_single"])
    c10d._register_work(out, start(out, input))
    return out
