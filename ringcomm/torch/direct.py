"""What a layer does in inference, as direct calls: linear layers with packed weights, and sums over a group."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

from ringcomm.torch.shared import communicator_of

__all__ = ["Function", "in_place_sum", "packed_linear", "packs"]

Function = Callable[[torch.Tensor], torch.Tensor]


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Function:
    """Return the function (…, in) → (…, out) of F.linear, for inference, with a weight (out, in) that does not change.

    On a CPU, F.linear in 16 bits lets oneDNN reorder the weight in each call, which with few rows takes longer than the
    product. Here it does so once, in a copy, also in float32. In bfloat16 the bits are those of F.linear on CPUs with
    AVX512-BF16 or AMX (torch 2.13), if the product has more than 16³ multiplications, as F.linear calls oneDNN from
    there on; otherwise it may be rounded differently. Autocast has no effect on packed weights: the input must have
    their dtype. Where a weight cannot be packed this is F.linear; see `packs`.
    """
    weight = weight.detach()
    if not packs(weight):
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


def packs(weight: torch.Tensor) -> bool:
    """Return whether `packed_linear` packs a weight: on CPUs where oneDNN is enabled and has kernels for the dtype."""
    mkldnn: Any = torch.backends.mkldnn
    onednn: Any = torch.ops.mkldnn
    if not (weight.is_cpu and mkldnn.is_available() and mkldnn.enabled):
        return False
    if not all(hasattr(onednn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False  # they are private
    if weight.dtype is torch.float32:
        return True
    supports = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return weight.dtype in supports and bool(getattr(onednn, supports[weight.dtype], bool)())
