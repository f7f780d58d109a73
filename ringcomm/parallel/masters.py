"""Float32 masters of 16-bit parameters, which an optimizer updates in their place."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["adopt_changes"]


def adopt_changes(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give each master the elements of its parameter that are no longer what the master rounds to.

    A program may load weights, clamp or average them after the masters were made; only their values tell, as `data`
    counts no versions.
    """
    with torch.no_grad():
        values = [(parameter.detach(), master.detach()) for parameter, master in pairs if parameter is not master]
        changes = [parameter.ne(master.to(parameter)) for parameter, master in values]
        if not changes:
            return
        found = torch.stack([each.any() for each in changes]).tolist()  # which waits for a GPU once
        for (parameter, master), changed, any_changed in zip(values, changes, found, strict=True):
            if any_changed:
                master.copy_(torch.where(changed, parameter.to(master.dtype), master.to(parameter.device)))
