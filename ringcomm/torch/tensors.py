"""Tensors as one communicator call takes them: in place where possible, else copied once.

ringcomm takes dense, contiguous memory of a dtype it knows, and a list of tensors as one array: tensors that are
adjacent in memory, as the chunks of one tensor are, need no copy. ringcomm/arrays/adapters.py then turns each into a
pointer.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from ringcomm.errors import refuse
from ringcomm.torch.compat.subclasses import NoMemory, unwrapped
from ringcomm.types import DTYPES

__all__ = [
    *("CallTensors", "Copies", "Lists", "Tensors", "for_ranks", "pairs", "single", "some", "split_counts"),
    *("unwritten", "without_overlap", "write_back"),
]

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Tensors]
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]

KNOWN = {getattr(torch, name) for name in DTYPES if hasattr(torch, name)}


class CallTensors:
    """The tensors of one call."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # output, copy: written back when the call is done

    def input(self, tensor: torch.Tensor, reduces: bool = False) -> torch.Tensor:
        """Return the memory to read. Tensors of unknown dtype are moved as bytes."""
        tensor = unwrapped(tensor)
        return _known(tensor if _plain(tensor) else _dense(tensor), reduces)

    def output(self, tensor: torch.Tensor, reduces: bool = False, reads: bool = False) -> torch.Tensor:
        """Return the memory to write; with `reads`, also to read."""
        tensor = unwrapped(tensor)
        if _plain(tensor):
            return _known(tensor, reduces)
        _check_writable(tensor)
        copy = _dense(tensor) if reads else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self.copies.append((tensor, copy))
        return _known(copy, reduces)

    def inout(self, tensor: torch.Tensor, reduces: bool = False) -> torch.Tensor:
        """Return the memory to read and write."""
        return self.output(tensor, reduces, reads=True)

    def input_for(self, output: torch.Tensor, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Return `tensor`, or a copy if it overlaps `output` and begins elsewhere than at `offset`, as in place."""
        begin, other = tensor.data_ptr(), output.data_ptr()
        overlaps = begin < other + output.nbytes and other < begin + tensor.nbytes
        return tensor.clone() if overlaps and begin != other + offset * output.element_size() else tensor

    def inputs(self, tensors: Tensors, reduces: bool = False) -> torch.Tensor:
        """Return one flat tensor with the elements of all tensors."""
        tensors = [unwrapped(tensor) for tensor in tensors]
        if (whole := _adjacent(tensors)) is not None:
            return _known(whole, reduces)
        return _known(torch.cat([_dense(tensor).reshape(-1) for tensor in tensors]), reduces)

    def all_inout(self, tensors: Tensors) -> torch.Tensor:
        """Return one flat tensor to read and write for all tensors, which do not overlap."""
        whole = self.inputs(tensors, reduces=True)
        tensors = [unwrapped(tensor) for tensor in tensors]
        if whole.data_ptr() != tensors[0].data_ptr():
            self.copies += zip(tensors, torch.split(whole, [tensor.numel() for tensor in tensors]), strict=True)
        return whole

    def outputs(self, tensors: Tensors) -> torch.Tensor:
        """Return one flat tensor to write for all tensors."""
        tensors = [unwrapped(tensor) for tensor in tensors]
        if (whole := _adjacent(tensors)) is not None:
            return _known(whole)
        for tensor in tensors:
            _check_writable(tensor)
        count = sum(tensor.numel() for tensor in tensors)
        whole = torch.empty(count, dtype=_dtype(tensors), device=tensors[0].device)
        self.copies += zip(tensors, torch.split(whole, [tensor.numel() for tensor in tensors]), strict=True)
        return _known(whole)


def write_back(copies: Copies) -> None:
    """Copy results to the outputs that could not be written in place."""
    for tensor, copy in copies:
        # Inference tensors may change in inference mode only, which is a mode of each thread.
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.copy_(copy.view(tensor.shape))


def some(tensors: Tensors) -> Tensors:
    if not tensors:
        raise refuse("tensors", "one or more", "an empty list")
    return tensors


def without_overlap(tensors: Tensors) -> tuple[Tensors, Copies]:
    """Return the tensors, and a copy of each that overlaps an earlier one in its place; and pairs of both."""
    apart, copies = [unwrapped(tensor) for tensor in tensors], []
    for met in _overlapping(apart):
        for index in met[1:]:
            copies.append((apart[index], apart[index].detach().clone()))
            apart[index] = copies[-1][1]
    return apart, copies


def unwritten(inputs: Tensors, outputs: Lists) -> Tensors:
    """Return the inputs of calls made one after another, with a copy of each that another call may write before.

    outputs[i] are those of the call that reads inputs[i].
    """
    inputs, count = [unwrapped(tensor) for tensor in inputs], len(inputs)
    call_of = [call for call, tensors in enumerate(outputs) for _ in tensors]
    written = [unwrapped(tensor) for tensors in outputs for tensor in tensors]
    for met in _overlapping([*inputs, *written]):
        calls = {index if index < count else call_of[index - count] for index in met}
        if met[-1] >= count and len(calls) > 1:
            for index in met:
                if index < count:
                    inputs[index] = inputs[index].detach().clone()
    return inputs


def single(items: Sequence[Any]) -> Any:
    """Return the only item of a list; c10d still has lists from when a process drove several GPUs."""
    if len(items) != 1:
        raise refuse("tensors", "one of each rank", len(items))
    return items[0]


def _overlapping(tensors: Tensors) -> Iterator[list[int]]:
    """Yield the indices of tensors whose memory overlaps, perhaps, in order: lists of two or more."""
    dense = [i for i, tensor in enumerate(tensors) if tensor.layout is torch.strided and not tensor.is_nested]
    spans = sorted((*_span(tensors[i]), i) for i in dense)
    reach, met = 0, list[int]()
    for begin, end, index in spans:
        if begin >= reach:
            if len(met) > 1:
                yield sorted(met)
            met = []
        met.append(index)
        reach = max(reach, end)
    if len(met) > 1:
        yield sorted(met)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses at which the elements of a tensor begin and end."""
    begin = tensor.data_ptr()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin


def _plain(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise refuse("tensor", "a dense one of an ordinary dtype", kind)
    if not (tensor.is_cpu or tensor.is_cuda):
        if tensor.is_meta:
            raise NoMemory
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
    """Return the tensors as one if they are adjacent in memory, in this order."""
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


# --- Lists that torch passes ------------------------------------------------------------------------------------------


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
