"""Optimizers that a function of the user creates, and their parameters."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ringcomm.errors import refuse

__all__ = ["create_optimizer", "optimized"]


def create_optimizer(what: str, factory: Callable[[Any], Optimizer], parameters: list[Any]) -> Optimizer:
    """Return the optimizer that `factory` creates for parameters, or groups of them; `what` is its name in errors.

    Raises:
        ArgumentError: it is not callable, there are no parameters, or it returns something else.
    """
    expected = "a function that creates a torch.optim.Optimizer for a list of parameters"
    if not callable(factory):
        raise refuse(what, expected, f"a {type(factory).__name__}")
    if not parameters:
        raise refuse(what, "at least one parameter to optimize", "none")
    optimizer = factory(parameters)
    if not isinstance(optimizer, Optimizer):
        raise refuse(what, expected, f"one that returns a {type(optimizer).__name__}")
    return optimizer


def optimized(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters of an optimizer, in order."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
