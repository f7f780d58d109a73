"""The sum of sparse tensors, as of the gradients of a sparse embedding: all ranks gather the indices and values."""

from typing import Any

import torch

from ringcomm import Communicator
from ringcomm.errors import MismatchError, refuse

__all__ = ["all_reduce"]

SHORT = (torch.float16, torch.bfloat16)  # added in float32, and rounded once


def all_reduce(comm: Communicator, tensor: torch.Tensor, op: Any, timeout: float | None) -> None:
    """Replace `tensor`, in layout torch.sparse_coo, by the sum or average over all ranks, coalesced. Blocks."""
    if op not in ("sum", "avg"):
        raise refuse("op", "sum or avg for sparse tensors", op)
    with torch.no_grad():
        mine = tensor.coalesce()
        indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
        kind = f"{tensor.dtype}, shape {tuple(tensor.shape)}, {tensor.sparse_dim()} sparse dimensions, {op}"
        passed = comm.all_gather_object((kind, len(values)), timeout=timeout)
        for rank, (theirs, _) in enumerate(passed):
            if theirs != passed[0][0]:
                message = f"all_reduce of sparse tensors: rank 0 passed {passed[0][0]}, and rank {rank} {theirs}"
                raise MismatchError(message, rank=rank, collective="all_reduce", expected=passed[0][0], got=theirs)
        counts = [count for _, count in passed]
        indices = comm.all_gather(indices, counts=counts, timeout=timeout)
        values = comm.all_gather(values, counts=counts, timeout=timeout)
        if tensor.dtype in SHORT:
            values = values.float()
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
        if op == "avg":
            total = _divided(total, comm.size)
    # Inference tensors may change in inference mode only.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        tensor.copy_(total.to(tensor.dtype))


def _divided(total: torch.Tensor, size: int) -> torch.Tensor:
    exact = total.is_floating_point() or total.is_complex()
    values = torch.div(total.values(), size, rounding_mode=None if exact else "trunc")
    return torch.sparse_coo_tensor(total.indices(), values, total.shape, is_coalesced=True)
