"""What is planned."""

from dataclasses import dataclass

from ringcomm.plan.model.devices import Accelerator
from ringcomm.plan.model.transformer import Transformer

__all__ = ["Workload"]


@dataclass(frozen=True)
class Workload:
    """The training of a model on GPUs.

    Attributes:
        model: the model
        device: the GPUs
        gpus: their number
        batch: sequences of a batch, of all replicas together
    """

    model: Transformer
    device: Accelerator
    gpus: int
    batch: int
