"""Float32 masters of 16-bit parameters, which an optimizer updates in their place."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["copy_changes"]


def copy_changes(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy to each master the elements of its parameter that are no longer what the master rounds to.

    A program may load weights, clamp or average them after the masters were made; only their values tell, as `data`
    counts no versions.
    """
    with torch.no_grad():
        values = [(parameter.detach(), master.detach()) for parameter, master in pairs if parameter is not master]
        changed = [parameter.ne(master.to(parameter)).any() for parameter, master in values]
        found = torch.stack(changed).tolist() if changed else []  # which waits for a GPU once
        for (parameter, master), any_changed in zip(values, found, strict=True):
            if any_changed:
                rounded, wide = master.to(parameter), master.to(parameter.device)
                master.copy_(torch.where(parameter.ne(rounded), parameter.to(wide.dtype), wide))
