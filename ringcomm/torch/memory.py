"""Tensors as one communicator call takes them: in place where that is possible, else copied once.

What ringcomm takes is dense and contiguous, of a dtype that it knows. Lists of tensors are one array for it: if they
lie one behind the other in memory, as the chunks of a tensor do, they are one already.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ringcomm.errors import refuse
from ringcomm.types import DTYPES

__all__ = ["Copies", "Memory", "Tensors", "only", "write_back"]

Tensors = Sequence[torch.Tensor]
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]

KNOWN = {getattr(torch, name) for name in DTYPES if hasattr(torch, name)}


class Memory:
    """The memory of one call."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # of tensors to be written when the call is done

    def source(self, tensor: torch.Tensor, reduces: bool = False) -> torch.Tensor:
        """Return what is read in place of `tensor`. A dtype that ringcomm does not know can be moved, as bytes."""
        return _known(tensor if _plain(tensor) else _dense(tensor), reduces)

    def target(self, tensor: torch.Tensor, reduces: bool = False) -> torch.Tensor:
        """Return what is written in place of `tensor`."""
        if _plain(tensor):
            return _known(tensor, reduces)
        _check_writable(tensor)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self.copies.append((tensor, copy))
        return _known(copy, reduces)

    def both(self, tensor: torch.Tensor, reduces: bool = False) -> torch.Tensor:
        """Return what is read and written in place of `tensor`."""
        if _plain(tensor):
            return _known(tensor, reduces)
        _check_writable(tensor)
        copy = _dense(tensor)
        self.copies.append((tensor, copy))
        return _known(copy, reduces)

    def beside(self, tensor: torch.Tensor, target: torch.Tensor, place: int) -> torch.Tensor:
        """Return `tensor`, or a copy of it if it overlaps `target` in any other way than by lying at `place` in it."""
        begin, other = tensor.data_ptr(), target.data_ptr()
        overlaps = begin < other + target.nbytes and other < begin + tensor.nbytes
        return tensor.clone() if overlaps and begin != other + place * target.element_size() else tensor

    def sources(self, tensors: Tensors, reduces: bool = False) -> torch.Tensor:
        """Return one flat tensor with the elements of all."""
        if (whole := _adjacent(tensors)) is not None:
            return _known(whole, reduces)
        return _known(torch.cat([_dense(tensor).reshape(-1) for tensor in tensors]), reduces)

    def targets(self, tensors: Tensors) -> torch.Tensor:
        """Return one flat tensor that is written in place of all."""
        if (whole := _adjacent(tensors)) is not None:
            return _known(whole)
        for tensor in tensors:
            _check_writable(tensor)
        count = sum(tensor.numel() for tensor in tensors)
        whole = torch.empty(count, dtype=_dtype(tensors), device=tensors[0].device)
        self.copies += zip(tensors, torch.split(whole, [tensor.numel() for tensor in tensors]), strict=True)
        return _known(whole)


def write_back(copies: Copies) -> None:
    """Copy what was written elsewhere to where it belongs."""
    for tensor, copy in copies:
        # Tensors of inference mode may be changed inside it only, and that is a mode of a thread.
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.copy_(copy.view(tensor.shape))


def only(things: Sequence[Any]) -> Any:
    """Return what c10d passes as a list, from the times of many GPUs per process."""
    if len(things) != 1:
        raise refuse("tensors", "one of each rank", len(things))
    return things[0]


def _plain(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise refuse("tensor", "a dense one of plain numbers", kind)
    if not (tensor.is_cpu or tensor.is_cuda):
        raise refuse("tensor", "memory of the host or of a GPU", tensor.device)
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _check_writable(tensor: torch.Tensor) -> None:
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise refuse("output", "memory for each element", f"an expanded tensor of shape {tuple(tensor.shape)}")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.contiguous().resolve_conj().resolve_neg() if not _plain(tensor) else tensor.detach()


def _known(tensor: torch.Tensor, reduces: bool = False) -> torch.Tensor:
    if tensor.dtype in KNOWN or reduces:
        return tensor
    return tensor.detach().reshape(-1).view(torch.uint8)


def _dtype(tensors: Tensors) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise refuse("the list", "tensors of one dtype", ", ".join(map(str, dtypes)))
    return dtypes.pop()


def _adjacent(tensors: Tensors) -> torch.Tensor | None:
    """Return the tensors as one, if they lie in one piece of memory in this order."""
    first = tensors[0]
    _dtype(tensors)
    if not all(_plain(tensor) for tensor in tensors):
        return None
    if any(a.data_ptr() + a.nbytes != b.data_ptr() for a, b in pairwise(tensors)):
        return None
    if any(a.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for a in tensors):
        return None
    count = sum(tensor.numel() for tensor in tensors)
    return first.detach().as_strided((count,), (1,))
