"""Subclasses of torch.Tensor: those whose memory other tensors hold, and those that have none."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from ringcomm.errors import refuse

__all__ = ["NoMemory", "Wrapper", "tracing", "unwrapped", "wraps"]

FAKE = torch._C._TorchDispatchModeKey.FAKE
ORDINARY = (torch.Tensor, torch.nn.Parameter)


class NoMemory(Exception):
    """A tensor has a shape and no memory: a FakeTensor, or one on the device meta. The call moves nothing then.

    So a program can be traced, or its memory estimated, without running it.
    """


class Wrapper(Exception):
    """A tensor is of a subclass that makes operations on it operations on others: wrappers.py makes the call."""


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the memory of this one: itself, as a rule. Raises NoMemory and Wrapper."""
    if type(tensor) in ORDINARY:
        return tensor
    inner: torch.Tensor = _unwrapped(tensor)
    return inner


def wraps(tensor: torch.Tensor) -> bool:
    """Return whether the class of a tensor has an own way to carry out operations."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def tracing() -> bool:
    """Return whether this thread makes FakeTensors only."""
    return torch._C._get_dispatch_mode(FAKE) is not None


def _unwrapped(tensor: Any) -> Any:
    if hasattr(tensor, "trigger_wait"):  # AsyncCollectiveTensor: a functional collective still writes it
        return unwrapped(tensor.trigger_wait())
    if is_fake(tensor):
        raise NoMemory
    if hasattr(tensor, "to_local"):
        raise refuse("tensor", "memory of its own (pass x.to_local())", f"a {type(tensor).__name__}")
    if wraps(tensor):
        raise Wrapper
    return tensor
