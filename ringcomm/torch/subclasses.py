"""Subclasses of torch.Tensor: those whose memory another tensor holds, and those that have none."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ringcomm.errors import refuse

__all__ = ["NoMemory", "tracing", "unwrapped"]

FAKE = torch._C._TorchDispatchModeKey.FAKE
ORDINARY = (torch.Tensor, torch.nn.Parameter)


class NoMemory(Exception):
    """A tensor has a shape and no memory: a FakeTensor, or one on the device meta. The call moves nothing then.

    So a program can be traced, or its memory estimated, without running it.
    """


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the memory of this one: itself, as a rule."""
    if type(tensor) in ORDINARY:
        return tensor
    inner: torch.Tensor = _unwrapped(tensor)
    return inner


def tracing() -> bool:
    """Return whether this thread makes FakeTensors only."""
    return torch._C._get_dispatch_mode(FAKE) is not None


def _unwrapped(tensor: Any) -> Any:
    if hasattr(tensor, "trigger_wait"):  # AsyncCollectiveTensor: a functional collective still writes it
        return unwrapped(tensor.trigger_wait())
    if is_fake(tensor):
        raise NoMemory
    if is_traceable_wrapper_subclass(tensor):
        inner = ", ".join(f".{name}" for name in tensor.__tensor_flatten__()[0])
        cure = "x.to_local()" if hasattr(tensor, "to_local") else f"the tensors that it wraps ({inner})"
        raise refuse("tensor", f"memory of its own (pass {cure})", f"a {type(tensor).__name__}")
    return tensor
