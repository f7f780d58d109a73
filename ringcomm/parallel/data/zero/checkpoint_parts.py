"""What a replica has of a parameter or of its state, for torch.distributed.checkpoint to save and load in place.

A piece of a parameter is a range of its elements. In a tensor of several dimensions a range is a few blocks: the end of
a row, whole rows, the beginning of a row. So a checkpoint has the tensors of the full model, whoever reads it.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ringcomm.errors import refuse
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.sharding import ShardSpec, full_shape

__all__ = ["paired_blocks", "part_of"]

Block = tuple[tuple[int, ...], Tensor]  # where it begins in the tensor, and its elements


def part_of(piece: Tensor, begin: int, whole: Tensor, spec: ShardSpec | None, tp: Axis) -> Tensor:
    """Return a piece, in the same memory, as part of the tensor of the full model; a scalar as it is.

    Args:
        piece: consecutive elements of `whole`, flat
        begin: the first of them
        whole: this rank's shard of the full tensor over `tp`, which may end in padding; only its shape counts
        spec: how it is sharded; None: it is not
        tp: the ranks with the other shards
    """
    if not whole.dim():
        return piece
    first, last = [0] * whole.dim(), list(whole.shape)  # of the shard in the full tensor
    if spec:
        first[spec.dim] = tp.rank * whole.shape[spec.dim]
        last[spec.dim] = min(last[spec.dim], spec.length - first[spec.dim])
    blocks = []
    for start, offsets, shape in _blocks(whole.shape, begin, begin + piece.numel()):
        block = piece[start - begin : start - begin + prod(shape)].view(shape)
        for dim, (offset, end) in enumerate(zip(offsets, last, strict=True)):
            block = block.narrow(dim, 0, max(0, min(block.shape[dim], end - offset)))  # without the padding
        if block.numel():
            blocks.append((tuple(x + y for x, y in zip(first, offsets, strict=True)), block))
    return _ShardedPart(full_shape(whole, spec), piece, blocks)


def paired_blocks(what: str, target: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the blocks of two parts of a tensor, or two whole tensors, in pairs.

    Raises:
        ArgumentError: they are not the same part of tensors of the same shape.
    """
    targets, sources = (x._blocks if isinstance(x, _ShardedPart) else [((), x)] for x in (target, source))
    pairs = [*zip(targets, sources, strict=False)]
    places_differ = any((x[0], x[1].shape) != (y[0], y[1].shape) for x, y in pairs)
    if target.shape != source.shape or len(targets) != len(sources) or places_differ:
        raise refuse(what, repr(target), repr(source))
    return [(x[1], y[1]) for x, y in pairs]


def _blocks(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Divide a range of the elements of a tensor into blocks: the first element, the offsets and the shape of each.

    Elements 3 to 18 of 4 rows of 5: 2 elements of row 0, rows 1 and 2, 3 elements of row 3.
    """
    row = prod(shape[1:])
    while begin < end:
        number, column = divmod(begin, row)
        if len(shape) == 1 or (column == 0 and end - begin >= row):
            rows = (end - begin) // row
            yield begin, (number, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            begin += rows * row
        else:
            stop = min(end, (number + 1) * row)
            for start, offsets, sizes in _blocks(shape[1:], column, stop - number * row):
                yield number * row + start, (number, *offsets), (1, *sizes)
            begin = stop


class _ShardedPart(Tensor):
    """The blocks of a tensor that this rank has: of its shape, but for torch.distributed.checkpoint only."""

    _blocks: list[Block]

    @staticmethod
    def __new__(cls, shape: torch.Size, like: Tensor, blocks: list[Block]) -> "_ShardedPart":
        part: _ShardedPart = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        part._blocks = blocks
        return part

    def __repr__(self) -> str:  # type: ignore[override]  # without torch's keyword
        blocks = ", ".join(f"{tuple(block.shape)} at {offset}" for offset, block in self._blocks)
        return f"part of {tuple(self.shape)}: {blocks}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs leave it untyped
        cls, func: Callable[..., Any], _: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what staging for an asynchronous save does: copies, and an empty one whose blocks it sets."""
        part, *others = args
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            if func is not torch.ops.aten.new_empty.default:
                raise TypeError(f"{func} on a part of a tensor, which is only saved and loaded")
            return _ShardedPart(part.shape, torch.empty(0, dtype=part.dtype), [])
        blocks = [(offset, func(block, *others, **(kwargs or {}))) for offset, block in part._blocks]
        return _ShardedPart(part.shape, blocks[0][1] if blocks else part, blocks)

    # --- What torch.distributed.checkpoint asks -----------------------------------------------------------------------

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        chunks = zip(self.__create_chunk_list__(), self._blocks, strict=True)
        items = []
        for chunk, (_offset, block) in chunks:
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(block), self.shape)
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), block.shape) for offset, block in self._blocks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(block for offset, block in self._blocks if offset == index.offset)
