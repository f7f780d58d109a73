"""all_reduce, the sum with a residual, and RMSNorm as one call: what tensor-parallel layers do one after another."""

import math
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.arrays.adapters import ADAPTERS
from ringcomm.communicator import Communicator
from ringcomm.devices.contract import Pointer
from ringcomm.errors import refuse
from ringcomm.native import ffi
from ringcomm.torch.shared import ringcomm_backend_of
from ringcomm.transports.calls import CollectiveCall
from ringcomm.transports.cuda.group import RmsNorm

__all__ = ["all_reduce_rms_norm"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PACK = 16  # bytes, to which a kernel needs its addresses aligned


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RMSNorm of the rows of `all_reduce(x) + residual`, times `weight`; and that sum, the next residual. ::

        hidden, residual = ringcomm.torch.all_reduce_rms_norm(hidden, residual, norm.weight, norm.eps, group=tp)

    Each step rounds to the dtype, as it does by itself: the bits are those of the steps one after another, as
    transformers does them in Llama, where all_reduce adds in the same order; on GPUs the order in which the squares of
    a row are added may change a bit, but hardly ever does. There small calls are one launch; other calls, and those on
    the CPU, are made of these steps. Nothing is written in place, and autograd records nothing.
    """
    _check(x, residual, weight, eps)
    comm: Communicator = ringcomm_backend_of(group, "cpu" if x.is_cpu else "cuda", "all_reduce_rms_norm").comm
    with torch.no_grad():
        x, residual, weight = (_aligned(tensor) for tensor in (x, residual, weight))
        total, output = torch.empty_like(x), torch.empty_like(x)
        adapter = ADAPTERS[type(x)]
        pointer, count, dtype = adapter.memory(x, False)
        if isinstance(pointer, Pointer):
            given, added, scale, result, target = (
                ffi.cast("void *", adapter.memory(tensor, False)[0].address)
                for tensor in (x, residual, weight, output, total)
            )
            norm = RmsNorm(added, scale, result, x.shape[-1], eps)
            call = CollectiveCall(given, target, count, dtype)
            if comm._router.all_reduce_rms_norm(pointer.device, call, norm):
                return output, total
        comm.all_reduce(x, out=total)
        total += residual
        return _rms_norm(total, weight, eps), total


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As kernels/cuda/rms_norm.cuh."""
    mean = x.double().square().mean(-1, keepdim=True).float()
    root = (mean + eps).double().sqrt().float()  # rounded to nearest, which torch's square root of float32 is not
    return (x.float() * (1 / root)).to(x.dtype) * weight


def _check(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight)):
        if not isinstance(tensor, torch.Tensor):
            raise refuse(name, "a tensor", f"a {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise refuse(name, "a dense tensor", "a nested one" if tensor.is_nested else tensor.layout)
    if x.dtype not in DTYPES:
        raise refuse("x", "a tensor of float16, bfloat16 or float32", x.dtype)
    if not x.dim() or not x.shape[-1]:
        raise refuse("x", "rows of one or more elements", f"the shape {tuple(x.shape)}")
    for name, tensor, shape in (("residual", residual, x.shape), ("weight", weight, x.shape[-1:])):
        if tensor.shape != shape:
            raise refuse(name, f"the shape {tuple(shape)}, as x has {tuple(x.shape)}", tuple(tensor.shape))
        if tensor.dtype != x.dtype:
            raise refuse(name, f"{x.dtype}, as x", tensor.dtype)
        if tensor.device != x.device:
            raise refuse(name, f"a tensor on {x.device}, as x", tensor.device)
    if not isinstance(eps, float | int) or not 0 <= eps < math.inf:
        raise refuse("eps", "a finite number >= 0", repr(eps))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    plain: Any = tensor.is_contiguous() and tensor.data_ptr() % PACK == 0
    return tensor if plain else tensor.clone(memory_format=torch.contiguous_format)
