"""Activations in less memory: recomputed from inputs that ranks divide, or off the device until backward.

`GPTConfig.recompute` selects the first for a GPT, and other kinds of recomputation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel.collectives import all_gathered, local_slice
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.state.host_memory import Folder, host_empty

__all__ = ["offload_activations", "sharded_checkpoint"]

SMALL = 4096  # bytes, a page of a file: smaller tensors stay


def sharded_checkpoint(fn: Callable[[Tensor], Tensor], x: Tensor, axis: Axis) -> Tensor:
    """Return fn(x), and recompute its activations in backward from an input of which each rank keeps 1/t.

    P_a of Rajbhandari et al., ZeRO (arXiv 1910.02054, section 6.1): the t ranks of a tensor axis have the same input of
    a block, which torch's `checkpoint` keeps on each of them. Inside `offload_activations` the shards are off the
    device (P_a+cpu). With sequence parallelism each rank has its own tokens: use `checkpoint`. Dropout draws the same
    numbers again.

    Forward: the communication of `fn`. Backward: an all-gather of the input, of S bytes, sends (t-1)/t · S; then that
    of the forward of `fn`, as far as it is needed, and of its backward.

    Args:
        fn: the block: input → output
        x: its input, the same on all ranks
        axis: the ranks

    Raises:
        ArgumentError: the number of elements of the input is not a multiple of t.
    """
    if axis.size == 1:
        return _checkpoint(fn, x)
    axis.divide("number of elements of the input", x.numel())
    unused, shape, differentiable = [x], x.shape, x.requires_grad

    def block(shard: Tensor) -> Tensor:
        # Gradients flow through the graph of the first run, to x; the second only fills in its saved tensors.
        full = unused.pop() if unused else all_gathered(shard, axis, 0).view(shape).requires_grad_(differentiable)
        return fn(full)

    return _checkpoint(block, local_slice(x.detach().flatten(), axis, 0))


def _checkpoint(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y: Tensor = checkpoint(fn, x, use_reentrant=False)
    return y


def offload_activations(folder: Folder | None = None) -> saved_tensors_hooks:
    """Return a block in which tensors saved for backward move off the device: to host memory, or to files. ::

        with offload_activations("/scratch"):
            loss = loss_fn(model(x), y)
        loss.backward()

    As Rajbhandari et al. offload them, to the host in ZeRO-R (arXiv 1910.02054, section 6.1) and to disks in
    ZeRO-Infinity (arXiv 2104.07857). Of a module inside torch's `checkpoint`, the input moves. Parameters stay, as do
    tensors of less than 4 KiB and, without a folder, those on a CPU. A tensor that two operations save is stored twice.

    From a GPU, copies run on a stream of their own beside forward; back, on that of backward. GPUs were not tested. No
    communication.

    Args:
        folder: where to keep the tensors, in files that vanish once backward has used them, or with the process,
            however it ends. None: in pinned host memory

    Raises:
        ArgumentError: the folder cannot be written to; in the block, it is full.
    """
    host_empty(torch.empty(1), folder)  # refuses a bad folder
    return saved_tensors_hooks(partial(_save, folder, {}), _restore)


class _Saved(NamedTuple):
    """A tensor off the device, and the stream that copies it there from a GPU."""

    host: Tensor
    device: torch.device
    stream: Any


def _save(folder: Folder | None, streams: dict[torch.device, Any], x: Tensor) -> Tensor | _Saved:
    is_weight = isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
    if is_weight or type(x) is not Tensor or x.nbytes < SMALL or (x.is_cpu and folder is None):
        return x
    host, x = host_empty(torch.empty_like(x, device="meta"), folder, pinned=x.is_cuda), x.detach()
    if not x.is_cuda:
        return _Saved(host.copy_(x), x.device, None)
    if x.device not in streams:
        streams[x.device] = torch.cuda.Stream(x.device)
    stream = streams[x.device]
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        host.copy_(x, non_blocking=True)
    x.record_stream(stream)
    return _Saved(host, x.device, stream)


def _restore(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if saved.stream:
        torch.cuda.current_stream(saved.device).wait_stream(saved.stream)
    return saved.host.to(saved.device, non_blocking=True)
