"""Lists that torch passes: a tensor for each rank, pairs of outputs and inputs, sizes of splits."""

from collections.abc import Sequence
from typing import Any

import torch

from ringcomm.errors import refuse
from ringcomm.torch.tensors import Tensors, some, unwritten

__all__ = ["for_ranks", "pairs", "split_counts"]


def for_ranks(group: Any, items: Sequence[Any], like: torch.Tensor | None = None) -> Sequence[Any]:
    """Return a list that must have one item for each rank; with `like`, tensors of its size."""
    if len(items) != group.size():
        raise refuse("the list", f"a tensor for each of {group.size()} ranks", f"{len(items)} tensors")
    if like is not None and any(tensor.numel() != like.numel() for tensor in items):
        sizes = ", ".join(str(tensor.numel()) for tensor in items)
        raise refuse("the list", f"tensors with {like.numel()} elements", f"tensors with {sizes} elements")
    return items


def pairs(outputs: Tensors, inputs: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the output and input of each of many calls, all of which read what was there before the first."""
    if len(outputs) != len(some(inputs)):
        raise refuse("outputs", f"{len(inputs)} tensors, as inputs", f"{len(outputs)} tensors")
    return [*zip(outputs, unwritten(inputs, [[out] for out in outputs]), strict=True)]


def split_counts(group: Any, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
    """Return the elements for, or from, each rank; torch passes rows, and an empty list for equal splits."""
    rows, size = tensor.shape[0] if tensor.dim() else 0, group.size()
    if not splits:
        if rows % size:
            raise refuse("axis 0", f"a multiple of {size} rows, or split sizes", f"{rows} rows")
        splits = [rows // size] * size
    elif sum(splits) != rows or len(splits) != size:
        raise refuse("split sizes", f"{size} numbers that add up to {rows} rows", list(splits))
    row = tensor.numel() // rows if rows else 0
    return [split * row for split in splits]
