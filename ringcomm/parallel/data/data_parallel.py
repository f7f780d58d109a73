"""Data parallelism: replicas of a model average their gradients, in buckets."""

import torch
from torch import nn

from ringcomm.errors import integer
from ringcomm.parallel.data.buckets import BUCKET_BYTES, GradientBucket, partition_by_axis
from ringcomm.parallel.data.gradient_sync import GradientSync, refuse_synchronized
from ringcomm.parallel.data.gradients import set_grad_dtype
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.replicas import broadcast_replicas, check_replicas
from ringcomm.parallel.sharding import Modules, as_list

__all__ = ["DataParallel"]


class DataParallel(GradientSync):
    """Averages the gradients of a module over its replicas.

    After Li et al., PyTorch Distributed (arXiv 2006.15704). Backward reaches the last parameters first, so gradients
    are collected in buckets in reverse order, and a full bucket is all-reduced while backward continues. Buckets are
    sent in the same order on every rank, in whatever order gradients arrive. Gradients become views of the buckets,
    which saves copying them back. ::

        data_parallel = DataParallel(model, grid.dp_cp)
        loss(model(x), y).backward()
        data_parallel.finish_grad_sync()
        optimizer.step()

    Communication: at construction, a broadcast of all parameters and buffers from the first replica. In each step,
    all-reduces that send 2 · (d-1)/d times the bytes of the gradients. The replicas of an expert are `grid.edp`.

    The object averages gradients until it is closed or deleted. Only then wrap the module again.

    Args:
        modules: a module, or the chunks of a pipeline
        dp: the replicas
        bucket_bytes: bytes of parameters at which a bucket is full
        grad_dtype: dtype in which gradients are accumulated, reduced and kept: torch.float32 for a model in bfloat16
            with many micro-batches, whose sum in bfloat16 loses small terms (as in Megatron-LM). It remains set on the
            parameters. `MixedPrecision` accepts any; most optimizers of torch need that of the parameters. None:
            unchanged.

    Raises:
        ArgumentError: the replicas differ in a parameter's shape, dtype or `requires_grad`, or in a buffer; or
            `grad_dtype` is not a floating-point type, or torch is too old for it; `bucket_bytes` is below 1;
            or the module is wrapped already.
    """

    def __init__(
        self, modules: Modules, dp: Axis, *, bucket_bytes: int = BUCKET_BYTES, grad_dtype: torch.dtype | None = None
    ) -> None:
        integer("bucket_bytes", bucket_bytes, 1)
        chunks = as_list(modules)
        module = nn.ModuleList(chunks)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        refuse_synchronized(trained)
        if grad_dtype:
            set_grad_dtype(trained, grad_dtype)
        buckets = []
        if dp.size > 1:
            check_replicas(module, dp)
            broadcast_replicas(module, dp)
            lists = partition_by_axis(trained[::-1], dp, module, bucket_bytes)
            buckets = [GradientBucket(listed, axis) for axis, listed in lists]
        super().__init__(chunks, dp, buckets)
