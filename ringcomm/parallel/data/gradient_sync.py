"""Gradients that replicas reduce while backward runs: what DataParallel and ShardedOptimizer have in common."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ringcomm.errors import ArgumentError
from ringcomm.parallel.grid import Axis, on_error

__all__ = ["GradientSync", "refuse_synchronized"]


class GradientSync:
    """Lets buckets collect gradients as backward finishes them, and reduces each once it is full.

    Buckets are sent in the same order on every rank, in whatever order gradients arrive. If this rank fails in that, it
    aborts the groups, so that none waits for it.

    Args:
        chunks: the modules, each of which has its own backward
        dp: the replicas
        buckets: in the order in which backward fills them. Each has `missing`, the parameters whose gradients are not
            collected yet, at first all; `dp`, its replicas; `collect(parameter)`; `send()`, once none is missing; and
            `wait()`.
    """

    tied: Set[torch.Tensor] | None = None  # whose gradients are summed with those of their copies; None: by others

    def __init__(self, chunks: Sequence[nn.Module], dp: Axis, buckets: Sequence[Any]) -> None:
        self.dp, self._buckets = dp, buckets
        self._sync = True
        self._sent = 0  # number of buckets that are being reduced
        # The gradient of a parameter of several chunks is final only after the backward of all: in `finish_grad_sync`.
        uses: Counter[torch.Tensor] = Counter(parameter for chunk in chunks for parameter in chunk.parameters())
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_collect, weakref.ref(self), bucket))
            for bucket in buckets
            for parameter in bucket.missing
            if uses[parameter] == 1
        ]
        self._remove_hooks = weakref.finalize(self, _remove_hooks, self._hooks)

    def close(self) -> None:
        """Average no longer. Needs no other rank, so it can follow a failure."""
        self._remove_hooks()

    def abort(self) -> None:
        """Abort the groups of the replicas."""
        for group in {self.dp.group, *(bucket.dp.group for bucket in self._buckets)}:
            group.abort()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the next `finish_grad_sync` averages them together with later ones."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish_grad_sync(self) -> None:
        """Wait until all gradients are averaged. Every rank calls it after backward, before it uses gradients.

        A parameter that had no part in the loss of any replica keeps its gradient, usually None, so that optimizers
        skip it. After a backward that failed, all ranks call it too before they continue.

        Raises:
            ArgumentError: a gradient is sparse, also in backward. The other ranks raise too (Aborted on ringcomm).
        """
        with on_error(self.abort):
            for bucket in self._buckets:
                for parameter in list(bucket.missing):
                    bucket.collect(parameter)
                self._send()
            for bucket in self._buckets:
                bucket.wait()
            self._sent = 0

    def _send(self) -> None:
        """Start to reduce every full bucket before the first that is not full."""
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._buckets[self._sent].send()
            self._sent += 1


def _remove_hooks(hooks: Iterable[RemovableHandle]) -> None:
    """Remove the hooks, which keep the buckets alive as long as the module."""
    for hook in hooks:
        hook.remove()


def _collect(owner: "weakref.ref[GradientSync]", bucket: Any, parameter: torch.Tensor) -> None:
    """Collect a gradient as backward finishes it."""
    sync = owner()
    if sync and sync._sync:
        if parameter not in bucket.missing:
            raise ArgumentError(
                "backward ran twice without synchronization: call finish_grad_sync after each backward, also after a "
                "failed one, run backward inside no_sync, or give this object to the Pipeline as data_parallel"
            )
        with on_error(sync.abort):
            bucket.collect(parameter)
            sync._send()


def refuse_synchronized(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ArgumentError if another object averages the gradients of a parameter."""
    for parameter in parameters:
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if any(getattr(hook, "func", None) is _collect for hook in hooks.values()):
            raise ArgumentError("module: already has a DataParallel or ShardedOptimizer; close it first")
