"""The calls that torch's wait_tensor waits for: those made under `allow_inflight_collective_as_graph_input_ctx`.

A compiled graph may then take the output of a call that still runs, and wait for it. c10d registers the work of each
such call for each of its outputs, and drops it when the program waits for the work itself.
"""

import threading
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["allowed", "drop", "is_dropping", "register"]

c10d: Any = torch._C._distributed_c10d
_here = threading.local()

allowed = getattr(c10d, "_allow_inflight_collective_as_graph_input", lambda: False)  # whether calls are registered


def register(work: Any) -> None:
    for tensor in work.outputs:
        c10d._register_work(tensor, work)


def drop(work: Any) -> None:
    """Forget the work. torch can only take out all that a tensor has, and waits for each; the others are put back."""
    for tensor in work.outputs:
        taken: list[Any] = []
        _here.taken = taken
        try:
            with _disable_current_modes(), torch.no_grad():
                torch.ops._c10d_functional.wait_tensor(tensor)
        finally:
            _here.taken = None
        for other in taken:
            if other is not work:
                c10d._register_work(tensor, other)


def is_dropping(work: Any) -> bool:
    """Return whether this wait is one of `drop`, which only wants to know what a tensor had."""
    taken = getattr(_here, "taken", None)
    if taken is not None:
        taken.append(work)
    return taken is not None
