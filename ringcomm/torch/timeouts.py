"""The timeouts of process groups and calls."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["seconds", "timeout_of"]


def timeout_of(group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu") -> timedelta | None:
    """Return the timeout that a group was made with, None if its backend does not say; of the default group, if None.

    `new_group` takes torch's default instead, whatever `init_process_group` was given.
    """
    found: Any = None
    with suppress(RuntimeError):  # the group has no backend for the device
        backend: Any = (group or dist.group.WORLD)._get_backend(torch.device(device))  # type: ignore[union-attr]  # there is a default group
        found = getattr(getattr(backend, "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else None


def seconds(timeout: timedelta | float | None) -> float | None:
    """Return torch's timeout in seconds; None, the group's own, if it is not positive."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    return timeout if timeout is not None and timeout > 0 else None
