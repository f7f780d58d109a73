"""Calls on tensors that wrap others, as those of quantized weights do.

torch calls its own backends through its dispatcher, in which the class of such a tensor makes the call again for each
of the tensors that it wraps. A group in Python is not called so; it lets the dispatcher take its call apart.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ringcomm.torch import observers
from ringcomm.torch.compat.subclasses import wraps

__all__ = ["calls_of"]

_Mode: Any = TorchDispatchMode  # torch does not type it

Work = Any  # a TorchWork


def calls_of(group: Any, method: str, arguments: tuple[Any, ...], done: Work) -> tuple[list[Work], list[torch.Tensor]]:
    """Make the calls that a call on wrappers stands for; return their works, and the outputs: c10d's first argument."""
    leaves, shape = tree_flatten(arguments)

    def call(tensors: list[torch.Tensor]) -> Work:
        given = iter(tensors)
        own = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return getattr(group, method)(*tree_unflatten(own, shape))

    with _Interception(call, done) as mode:
        observers.call_silently(group, method, [0 if each is None else each for each in arguments])  # None: any peer
    return mode.works, [leaf for leaf in tree_leaves(arguments[0]) if isinstance(leaf, torch.Tensor)]


class _Interception(_Mode):  # type: ignore[misc]  # torch's stubs leave it out
    """Makes the calls that arrive with ordinary tensors alone. The dispatcher gets `done` as the work of each."""

    def __init__(self, call: Callable[[list[torch.Tensor]], Work], done: Work) -> None:
        super().__init__()
        self._call, self._done = call, done
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if any(map(wraps, tensors)):
            return NotImplemented
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        self.works.append(self._call(tensors))
        returns = func._schema.returns  # the outputs, which are the first argument, and the work; or the work alone
        return (args[0], self._done.boxed()) if len(returns) > 1 else self._done.boxed()
