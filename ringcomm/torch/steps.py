"""Marks between the training steps in a trace."""

import torch.distributed as dist

from ringcomm.errors import ArgumentError
from ringcomm.torch.shared import communicator_of

__all__ = ["step"]


def step() -> None:
    """Mark the end of a training step in the trace of the default group, if there is one; see `Communicator.mark`.

    `ringcomm trace` then tells how much of a step is spent waiting for communication.
    """
    comm = communicator_of() if dist.is_initialized() else None
    if comm is None:
        raise ArgumentError("step needs a default group whose tensors on the CPU use the backend ringcomm")
    comm.mark("step")
