"""Memory off the device, for optimizer states and activations: of the host, or of a file that is mapped into memory."""

import os
import tempfile

import torch
from torch import Tensor

from ringcomm.errors import refuse

__all__ = ["Folder", "host_empty"]

Folder = str | os.PathLike[str]


def host_empty(like: Tensor, folder: Folder | None = None, *, pinned: bool = False) -> Tensor:
    """Return an uninitialized tensor of the shape, strides and dtype of a dense tensor, which may be on "meta".

    Args:
        like: the tensor
        folder: where to write a file. It has no name, so the system deletes it with the tensor, or with the process,
            however it ends. None: memory of the host
        pinned: whether a GPU copies from and to the memory of the host

    Raises:
        ArgumentError: the folder does not exist, cannot be written to, or is full.
    """
    if folder is None:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, pin_memory=pinned)
    if not os.path.isdir(folder):
        raise refuse("folder", "one that exists", folder)
    size = max(1, like.numel())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserved now, because a write to a mapping that finds the disk full ends in SIGBUS.
            os.posix_fallocate(file.fileno(), 0, size * like.element_size())
            flat = torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=size, dtype=like.dtype)
    except OSError as error:
        raise refuse("folder", f"one with room for {like.nbytes:,} bytes", f"{folder} ({error})") from error
    return flat.as_strided(like.shape, like.stride())
