"""The time of a training step in closed form, and where it goes.

The layers of a rank for all micro-batches, the pipeline that waits for other ranks, the gradients and the optimizer.
docs/plan.md derives the figures.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from ringcomm.pipelining import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Timeline,
    make_schedule,
    timeline,
)
from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.workload import Workload
from ringcomm.plan.price.interconnect import Interconnect
from ringcomm.plan.price.layer import LayerPricing, Passes
from ringcomm.plan.price.memory import replicated
from ringcomm.plan.price.pipeline import pipeline_seconds
from ringcomm.plan.price.traffic import Payloads, payloads

__all__ = ["PARTS", "Pricing", "StepCost", "StepParts"]


class StepParts(NamedTuple):
    """Seconds of a step on the slowest rank, part by part."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    recompute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    logits: float = 0.0
    bubble: float = 0.0
    p2p: float = 0.0
    dp: float = 0.0
    optimizer: float = 0.0


PARTS = {  # in words
    "gemm": "matrix products of the layers",
    "attention": "scores, softmax and their products",
    "elementwise": "norms, GELU, residual branches, dropout, transposes",
    "launch": "waiting for the host to launch kernels",
    "recompute": "layers or attention computed again in backward",
    "tp": "collectives of tensor and sequence parallelism",
    "cp": "keys and values of ring attention that computation does not hide",
    "ep": "exchanges of tokens between experts",
    "logits": "output layer and loss, on the last stage",
    "bubble": "waiting for other stages, or for a core that ranks share",
    "p2p": "transfers between stages",
    "dp": "reductions of gradients that backward does not hide, and ZeRO's gathering of parameters",
    "optimizer": "reading and writing parameters and states",
}


@dataclass(frozen=True)
class StepCost:
    """The time of a step.

    Attributes:
        parts: its parts
        forward, backward: seconds of all layers of a rank for one micro-batch; backward with recomputation
        weights: the part of backward that computes gradients of weights
        logits: seconds more on the last stage, for one micro-batch
        transfer: seconds of an activation between two stages
    """

    parts: StepParts
    forward: float
    backward: float
    weights: float
    logits: float
    transfer: float

    @property
    def seconds(self) -> float:
        return sum(self.parts)


class Pricing:
    """Prices layouts of one workload. It keeps the layers that layouts have in common."""

    def __init__(self, workload: Workload) -> None:
        self.model, self.device, self.batch = workload.model, workload.device, workload.batch
        self.network = Interconnect(self.device, workload.gpus)
        self.layers = LayerPricing(self.model, self.device, self.network)
        self._ran: dict[tuple[object, ...], float] = {}

    def step(self, layout: ParallelLayout) -> StepCost:
        """Return the cost of a step."""
        model, m = self.model, layout.micro_batches(self.batch)
        layers = model.layers // layout.pp
        layer = self.layers.cost(layout)
        forward = layers * sum(layer.forward)
        backward = layers * (sum(layer.backward) + layer.recompute)
        logits = self.logits(layout)
        # A backward has two products for each of forward: one for the gradient of the input, one for that of weights.
        cost = StepCost(StepParts(), forward, backward, layers * layer.forward.gemm, logits, self.transfer(layout))
        without_transfers = self.pipeline(layout, replace(cost, transfer=0))
        busy = m * (forward + backward + logits)
        # Ranks that share a processor get it while others wait.
        waiting = max(without_transfers, busy * self.device.ranks_per_core) - busy
        passes = (m * layers * (each + other) for each, other in zip(layer.forward, layer.backward, strict=True))
        parts = StepParts(
            **dict(zip(Passes._fields, passes, strict=True)),
            recompute=m * layers * layer.recompute,
            logits=m * logits,
            bubble=waiting,
            p2p=self.pipeline(layout, cost) - without_transfers,
            dp=self.gradients(layout, forward, backward),
            optimizer=self.optimizer(layout),
        )
        return replace(cost, parts=parts)

    def pipeline(self, layout: ParallelLayout, cost: StepCost) -> float:
        """Return the seconds of the pipeline: in closed form, or where there is none by running the schedule."""
        if layout.split_backward:
            key = replace(layout, zero=0), cost.transfer
            if key not in self._ran:
                self._ran[key] = self.timeline(layout, cost).makespan
            return self._ran[key]
        work = cost.forward + cost.backward
        m = layout.micro_batches(self.batch)
        return pipeline_seconds(layout.pp, m, layout.chunks, work, cost.logits, cost.transfer)

    def timeline(self, layout: ParallelLayout, cost: StepCost) -> Timeline:
        """Return the times of all actions of the schedule that `Pipeline` executes."""
        v = layout.chunks
        schedule = make_schedule(layout.schedule, layout.pp, layout.micro_batches(self.batch), v)
        backward, weights, third = cost.backward / v, cost.weights / v, cost.logits / 3  # of three equal products
        times = {
            FORWARD: cost.forward / v,
            BACKWARD: backward,
            BACKWARD_INPUT: backward - weights,
            BACKWARD_WEIGHT: weights,
        }
        last, logits = schedule.stages - 1, {BACKWARD: 2 * third}

        def seconds(stage: int, phase: str) -> float:
            return times[phase] + (stage == last) * logits.get(phase, third)

        return timeline(schedule, seconds, cost.transfer)

    def payloads(self, layout: ParallelLayout) -> Payloads:
        return payloads(self.model, layout, self.device.element)

    def logits(self, layout: ParallelLayout) -> float:
        """Return the seconds of output layer and loss, and of the collectives of the embedding."""
        model, element = self.model, self.device.element
        tokens = layout.micro_batch * model.seq // layout.cp
        rows = model.embedding_parameters(layout.tp) // model.hidden
        # Read the logits, write them in float32, subtract the maximum, exponentiate, add up; then write the gradient.
        elementwise = tokens * rows * (16 + 2 * element) / self.layers.bandwidth
        enter = self.network.collective("all_reduce", self.payloads(layout).block, layout.tp, 1)
        return 3 * self.layers.product(tokens, rows, model.hidden) + elementwise + (2 if layout.pp == 1 else 1) * enter

    def transfer(self, layout: ParallelLayout) -> float:
        """Return the seconds in which an activation goes to the next stage: each `tp` rank sends its share.

        Without sequence parallelism the next stage gathers the shares (Narayanan et al., arXiv 2104.04473, 4.1).
        """
        if layout.pp == 1:
            return 0.0
        size = self.payloads(layout).block
        latency, byte_time = self.network.hop(layout.pp, layout.gpus // layout.pp)
        gather = 0.0 if layout.sequence_parallel else self.network.collective("all_gather", size, layout.tp, 1)
        return latency + byte_time * size / layout.tp + gather

    def gradients(self, layout: ParallelLayout, forward: float, backward: float) -> float:
        """Return the seconds of the data-parallel traffic that are not hidden.

        Ψ parameters of a rank send 2Ψ(d-1)/d elements in a step; with stage 3 of ZeRO, 3Ψ(d-1)/d in each micro-batch.
        """
        device, size = self.device, self.payloads(layout)
        name = "all_gather" if layout.zero == 3 else "all_reduce"
        strides = layout.tp, layout.tp * layout.ep  # of every ep ranks one has the same experts
        traffic = sum(
            self.network.collective(name, part, replicas, stride)
            for (part, replicas), stride in zip(size.gradients, strides, strict=False)
        )
        if layout.zero == 3:
            traffic *= 3
            return layout.micro_batches(self.batch) * max(0.0, traffic - device.overlap * (forward + backward))
        if layout.last_rank:  # between the first stage and the last
            traffic += self.network.collective("all_reduce", size.tied, 2, layout.gpus // 2)
        return max(0.0, traffic - device.overlap * backward)

    def optimizer(self, layout: ParallelLayout) -> float:
        """Return the seconds of Adam: read masters, moments and the gradient, write masters, moments, parameters.

        The gradient is read once more for its norm, and read and written to be scaled.
        """
        parts = replicated(self.model, layout, 0)
        updated = sum(count / (replicas if layout.zero else 1) for count, replicas in parts)
        return updated * (24 + 5 * self.device.element) / self.layers.bandwidth
