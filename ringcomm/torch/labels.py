"""Names for torch.profiler."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.profiler import record_function

__all__ = ["enable_profiler_labels", "enabled", "label"]

enabled = False


def enable_profiler_labels(on: bool = True) -> None:
    """Let torch.profiler see every call of the backend and every wait: as `ringcomm::all_reduce 4096 B group 0`.

    Off by default: a label costs about a microsecond, also when no profiler runs.
    """
    global enabled
    enabled = on


def label(group: Any, call: str, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
    """Return the context in which a call is made, or waited for."""
    size = sum(tensor.nbytes for tensor in tensors)
    return record_function(f"ringcomm::{call} {size} B group {group.group_name}")
