"""Shows the calls of a group to torch's tools, as torch shows those of its own backends.

torch.profiler gets one event for each call, with the shapes of its inputs. Dispatch modes, of which CommDebugMode is
one, see the operator of c10d: a group in Python is not called through the dispatcher.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack as modes
from torch._C._autograd import _profiler_enabled as profiling  # on this thread
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

__all__ = ["OLDER", "call_silently", "label", "recorders", "show_to_modes", "timed", "waits", "watched"]

c10d: Any = torch._C._distributed_c10d

# Each is called with the group, the name of the communicator's method and the outputs of a call, on any thread.
recorders: list[Callable[[Any, str, Sequence[torch.Tensor]], object]] = []

# Each is called with the seconds that a thread has spent in a call, or waiting for one that it had started, on it.
waits: list[Callable[[float], object]] = []

# The names of methods before torch 2.13, which a group has, too.
OLDER = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}

UNLABELED = nullcontext()
_here = threading.local()


def watched() -> bool:
    """Return whether a tool watches the calls of this thread; in 0.1 us, and each call asks."""
    return profiling() or bool(modes())


def timed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call, or, while `waits` are there, one that reports its time to them."""
    return partial(_timed, call) if waits else call


def _timed(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    begin = perf_counter()
    try:
        return call(*arguments, **options)
    finally:
        for record in waits:
            record(perf_counter() - begin)


def label(
    group: Any, call: str, inputs: Iterable[Any], method: str | None = None, arguments: tuple[Any, ...] = ()
) -> AbstractContextManager[object]:
    """Return the context in which to make a call: the event `ringcomm:all_reduce` while a profiler runs.

    The calls that a call is made of are not shown. `inputs` are tensors, or lists of them. With the name of a `method`
    of c10d, and its arguments, modes see that call at once.
    """
    return _shown(group, call, list(_flat(inputs)), method, arguments) if watched() else UNLABELED


@contextmanager
def _shown(
    group: Any, call: str, tensors: list[torch.Tensor], method: str | None, arguments: tuple[Any, ...]
) -> Iterator[None]:
    if getattr(_here, "inside", False):
        yield
        return
    if call == "all_reduce" and any(tensor.is_sparse for tensor in tensors):
        call = "sparse_all_reduce"
    if method:
        show_to_modes(group, method, arguments)
    _here.inside, _here.of_many = True, method is not None
    try:
        with torch._C._profiler._RecordFunctionFast(f"{group.getBackendName()}:{call}", tensors):
            yield
    finally:
        _here.inside = _here.of_many = False


def show_to_modes(group: Any, method: str, arguments: tuple[Any, ...]) -> None:
    """Make a call through the dispatcher that communicates nothing, on tensors like those given, if modes are active.

    Raises what a mode raises.
    """
    if not modes() or getattr(_here, "of_many", False):
        return
    with _disable_current_modes():
        arguments = tree_map_only(torch.Tensor, torch.empty_like, arguments)
    try:
        call_silently(group, method, arguments)
    except RuntimeError:
        try:
            with _disable_current_modes():
                call_silently(group, method, arguments)
        except RuntimeError:  # the silent group knows no lists of uneven sizes, say
            return
        raise  # a mode has refused the call


def call_silently(group: Any, method: str, arguments: Iterable[Any]) -> None:
    """Make a call through the dispatcher that communicates nothing."""
    with _disable_current_modes():
        silent = _silent_group(group.rank(), group.size())
    call = getattr(silent, method, None) or getattr(silent, OLDER[method])
    call(*arguments)


@cache
def _silent_group(rank: int, size: int) -> Any:
    group, kind = c10d.ProcessGroup(c10d.HashStore(), rank, size), c10d.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    fake = c10d.FakeProcessGroup
    backend = getattr(fake, "_create_internal", fake)(rank, size)  # older torch has a constructor alone
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    return group


def _flat(inputs: Iterable[Any]) -> Iterator[torch.Tensor]:
    for item in inputs:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _flat(item)
