"""Shows the calls of a group to torch's tools, as torch shows those of its own backends.

torch.profiler gets one event for each call, with the shapes of its inputs. Dispatch modes, of which CommDebugMode is
one, see the operator of c10d: a group in Python is not called through the dispatcher.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack as modes
from torch._C._autograd import _profiler_enabled as profiling  # on this thread
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

__all__ = ["label", "recorders", "watched"]

c10d: Any = torch._C._distributed_c10d

# Each is called with the group, the name of the communicator's method and the outputs of a call, on any thread.
recorders: list[Callable[[Any, str, Sequence[torch.Tensor]], object]] = []

UNLABELED = nullcontext()
_here = threading.local()


def watched() -> bool:
    """Return whether a tool watches the calls of this thread; in 0.1 us, and each call asks."""
    return profiling() or bool(modes())


def label(
    group: Any, call: str, inputs: Iterable[Any], method: str, arguments: tuple[Any, ...]
) -> AbstractContextManager[object]:
    """Return the context in which to make a call: the event `ringcomm:all_reduce` while a profiler runs.

    The calls that a call is made of are not shown. `inputs` are tensors, or lists of them; `method` is c10d's, and
    `arguments` are given to it.
    """
    return _shown(group, call, list(_flat(inputs)), method, arguments) if watched() else UNLABELED


@contextmanager
def _shown(
    group: Any, call: str, tensors: list[torch.Tensor], method: str, arguments: tuple[Any, ...]
) -> Iterator[None]:
    if getattr(_here, "inside", False):
        yield
        return
    if call == "all_reduce" and any(tensor.is_sparse for tensor in tensors):
        call = "sparse_all_reduce"
    _here.inside = True
    try:
        if modes():
            _show_to_modes(group.rank(), group.size(), method, arguments)
        with torch._C._profiler._RecordFunctionFast(f"{group.getBackendName()}:{call}", tensors):
            yield
    finally:
        _here.inside = False


def _show_to_modes(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> None:
    """Make a call through the dispatcher that communicates nothing, on tensors like those given."""
    with _disable_current_modes():
        group = _silent_group(rank, size)
        arguments = tree_map_only(torch.Tensor, torch.empty_like, arguments)
    with suppress(RuntimeError):  # the silent group copies some inputs, and knows no lists of uneven sizes
        getattr(group, method)(*arguments)


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
        else:
            yield from _flat(item)
