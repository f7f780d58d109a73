"""What a layer does in inference, as direct calls: linear layers with packed weights, sums and gathers of a group."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

from ringcomm.torch.shared import communicator_of

__all__ = ["Function", "in_place_sum", "packed_linear"]

Function = Callable[[torch.Tensor], torch.Tensor]


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Function:
    """Return the function (…, in) → (…, out) of F.linear, for inference, with a weight (out, in) that does not change.

    On a CPU, F.linear lets oneDNN reorder the weight in each call, which with few rows takes longer than the product.
    Here it does so once, in a copy. The bits are the same in bfloat16 on the CPUs that were tried (AVX-512, torch
    2.13). On other devices, for other dtypes and where oneDNN has no kernels for the dtype this is F.linear.
    """
    weight = weight.detach()
    if not _packs(weight):
        return partial(F.linear, weight=weight, bias=bias)
    onednn: Any = torch.ops.mkldnn  # these operations are those that torch's compiler calls
    packed, linear = onednn._reorder_linear_weight(weight.contiguous()), onednn._linear_pointwise.default
    return lambda x: linear(x, packed, bias, "none", [], "")


def in_place_sum(group: dist.ProcessGroup, device: torch.device) -> Callable[[torch.Tensor], Any]:
    """Return a function that sums a contiguous tensor over the ranks of a group, in place.

    On the CPU it is the call of ringcomm's communicator, without the layers of torch.distributed, if the group has one.
    """
    if dist.get_world_size(group) == 1:
        return lambda _: None
    comm = communicator_of(group) if device.type == "cpu" else None
    return comm.all_reduce if comm else partial(dist.all_reduce, group=group)


def _packs(weight: torch.Tensor) -> bool:
    is_there: Any = torch.backends.mkldnn.is_available
    if not (weight.is_cpu and is_there()):
        return False
    onednn: Any = torch.ops.mkldnn
    if weight.dtype in (torch.bfloat16, torch.float16):
        is_half = weight.dtype is torch.float16
        return bool(onednn._is_mkldnn_fp16_supported() if is_half else onednn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32
