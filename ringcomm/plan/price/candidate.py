"""One layout of a workload, priced: the seconds of a step, and the memory of the fullest rank."""

from typing import NamedTuple

from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.workload import Workload
from ringcomm.plan.price.layer import CAUSAL
from ringcomm.plan.price.memory import MemoryUse, memory_use
from ringcomm.plan.price.step import Pricing, StepCost

__all__ = ["Candidate", "fullest", "price"]


class Candidate(NamedTuple):
    """A layout of a workload with its cost, and the memory of the fullest rank."""

    workload: Workload
    layout: ParallelLayout
    cost: StepCost
    memory: MemoryUse

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.workload.device.available

    @property
    def utilization(self) -> float:
        """The model FLOPs utilization: FLOPs without those computed again, over what the GPUs could do.

        Of the scores, fused attention has to compute half.
        """
        workload, device = self.workload, self.workload.device
        flops = workload.model.step_flops(workload.batch, CAUSAL if device.attention == "fused" else 1)
        return flops / (self.cost.seconds * workload.gpus * device.flops)


def price(workload: Workload, layout: ParallelLayout) -> Candidate:
    """Return one layout with its cost, whether it fits or not.

    Raises:
        ArgumentError: it is not legal.
    """
    layout.check(workload.model, workload.batch, workload.gpus, workload.device.attention)
    return Candidate(workload, layout, Pricing(workload).step(layout), fullest(workload, layout))


def fullest(workload: Workload, layout: ParallelLayout) -> MemoryUse:
    """Return the memory of the rank that needs most: the first, which has most in flight, or the last, with logits."""
    model, device, batch = workload.model, workload.device, workload.batch
    uses = [memory_use(model, layout, device, batch, rank) for rank in {0, layout.pp - 1}]
    return max(uses, key=lambda use: use.total)
