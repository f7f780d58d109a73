"""The time of a training step in closed form, and where it goes.

A layer is matrix products at the rate of the device, elementwise kernels at the bandwidth of its memory, and
collectives at the prices of `ringcomm.algorithms`. docs/plan.md derives the figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from ringcomm.algorithms.cost import Cluster, LinkCost, closed_form
from ringcomm.algorithms.select import select
from ringcomm.plan.devices import Accelerator
from ringcomm.plan.layout import ParallelLayout
from ringcomm.plan.memory import MASK, stage_parameters, stores_scores
from ringcomm.plan.model import Transformer
from ringcomm.plan.pipeline import pipeline_seconds
from ringcomm.plan.traffic import payloads

__all__ = ["CAUSAL", "FUSED_BACKWARD", "PARTS", "Pricing", "StepCost"]

# The parts of a step, in seconds on the slowest rank.
PARTS = {
    "gemm": "matrix products of the layers",
    "attention": "scores, softmax and their products",
    "elementwise": "norms, GELU, residual branches, dropout, transposes",
    "launch": "waiting for the host to launch kernels",
    "recompute": "layers or attention computed again in backward",
    "tp": "collectives of tensor and sequence parallelism",
    "cp": "keys and values of ring attention that computation does not hide",
    "logits": "output layer and loss, on the last stage",
    "bubble": "waiting for other stages, or for a core that ranks share",
    "p2p": "transfers between stages",
    "dp": "reductions of gradients that backward does not hide, and ZeRO's gathering of parameters",
    "optimizer": "reading and writing parameters and states",
}

CAUSAL = 1 / 2  # share of the scores that fused attention computes
FUSED_BACKWARD = 5 / 2  # products in backward for each in forward: five and two (Dao, arXiv 2307.08691, section 3.1)


class Passes(NamedTuple):
    """Seconds of a layer for one micro-batch."""

    gemm: float
    attention: float
    elementwise: float
    launch: float
    tp: float
    cp: float


class LayerCost(NamedTuple):
    """Seconds of a layer's forward, backward, and what backward computes again."""

    forward: Passes
    backward: Passes
    recompute: float


@dataclass(frozen=True)
class StepCost:
    """The time of a step.

    Attributes:
        parts: seconds by part, see PARTS
        forward, backward: seconds of all layers of a rank for one micro-batch; backward with recomputation
        logits: seconds more on the last stage, for one micro-batch
        transfer: seconds of an activation between two stages
    """

    parts: Mapping[str, float]
    forward: float
    backward: float
    logits: float
    transfer: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class Pricing:
    """Prices layouts of one model, batch and number of GPUs. It keeps the layers that layouts have in common."""

    def __init__(self, model: Transformer, device: Accelerator, gpus: int, batch: int) -> None:
        self.model, self.device, self.gpus, self.batch = model, device, gpus, batch
        constants = device.calibration
        self.node = min(device.node, gpus)
        self.flops = device.flops * constants.gemm
        self.bandwidth = device.bandwidth * constants.memory
        self.inside = LinkCost(device.inside_latency, 1 / (device.inside * constants.inside))
        self.between = LinkCost(device.between_latency, 1 / (device.between * constants.between))
        self._layers: dict[tuple[object, ...], LayerCost] = {}
        self._collectives: dict[tuple[object, ...], float] = {}

    # --- A step -------------------------------------------------------------------------------------------------------

    def step(self, layout: ParallelLayout) -> StepCost:
        """Return the cost of a step."""
        model, m = self.model, layout.micro_batches(self.batch)
        layers = model.layers // layout.pp
        layer = self.layer(layout)
        forward = layers * sum(layer.forward)
        backward = layers * (sum(layer.backward) + layer.recompute)
        logits = self.logits(layout)
        transfer = self.transfer(layout)
        pipeline = layout.pp, m, layout.chunks, forward + backward, logits
        without_transfers = pipeline_seconds(*pipeline, 0)
        busy = m * (forward + backward + logits)
        # Ranks that share a processor get it while others wait.
        waiting = max(without_transfers, busy * self.device.ranks_per_core) - busy
        passes = {
            name: m * layers * (each + other)
            for name, each, other in zip(Passes._fields, layer.forward, layer.backward, strict=True)
        }
        parts = {
            **passes,
            "recompute": m * layers * layer.recompute,
            "logits": m * logits,
            "bubble": waiting,
            "p2p": pipeline_seconds(*pipeline, transfer) - without_transfers,
            "dp": self.gradients(layout, forward, backward),
            "optimizer": self.optimizer(layout),
        }
        return StepCost(parts, forward, backward, logits, transfer)

    def logits(self, layout: ParallelLayout) -> float:
        """Return the seconds of output layer and loss, and of the collectives of the embedding."""
        model, element = self.model, self.device.element
        tokens = layout.micro_batch * model.seq // layout.cp
        rows = model.embedding_parameters(layout.tp) // model.hidden
        # Read the logits, write them in float32, subtract the maximum, exponentiate, add up; then write the gradient.
        elementwise = tokens * rows * (16 + 2 * element) / self.bandwidth
        enter = self.collective("all_reduce", payloads(model, layout, element).block, layout.tp, 1)
        return 3 * self.product(tokens, rows, model.hidden) + elementwise + (2 if layout.pp == 1 else 1) * enter

    def transfer(self, layout: ParallelLayout) -> float:
        """Return the seconds in which an activation goes to the next stage: each `tp` rank sends its share.

        Without sequence parallelism the next stage gathers the shares (Narayanan et al., arXiv 2104.04473, 4.1).
        """
        if layout.pp == 1:
            return 0.0
        size = payloads(self.model, layout, self.device.element).block
        latency, byte_time = self.link(layout.pp, layout.gpus // layout.pp)
        gather = 0.0 if layout.sequence_parallel else self.collective("all_gather", size, layout.tp, 1)
        return latency + byte_time * size / layout.tp + gather

    def gradients(self, layout: ParallelLayout, forward: float, backward: float) -> float:
        """Return the seconds of the data-parallel traffic that are not hidden.

        Ψ parameters of a rank send 2Ψ(d-1)/d elements in a step; with stage 3 of ZeRO, 3Ψ(d-1)/d in each micro-batch.
        """
        device, replicas = self.device, layout.dp * layout.cp
        size = payloads(self.model, layout, device.element)
        if layout.zero == 3:
            traffic = 3 * self.collective("all_gather", size.gradients, replicas, layout.tp)
            return layout.micro_batches(self.batch) * max(0.0, traffic - device.overlap * (forward + backward))
        traffic = self.collective("all_reduce", size.gradients, replicas, layout.tp)
        if layout.pp > 1:  # between the first stage and the last
            traffic += self.collective("all_reduce", size.tied, 2, layout.gpus // 2)
        return max(0.0, traffic - device.overlap * backward)

    def optimizer(self, layout: ParallelLayout) -> float:
        """Return the seconds of Adam: read masters, moments and the gradient, write masters, moments, parameters.

        The gradient is read once more for its norm, and read and written to be scaled.
        """
        share = layout.dp * layout.cp if layout.zero else 1
        return stage_parameters(self.model, layout, 0) / share * (24 + 5 * self.device.element) / self.bandwidth

    # --- A layer ------------------------------------------------------------------------------------------------------

    def layer(self, layout: ParallelLayout) -> LayerCost:
        """Return the cost of a layer."""
        key = layout.tp, layout.cp, layout.micro_batch, layout.sequence_parallel, layout.recompute
        if key not in self._layers:
            self._layers[key] = self._layer(layout)
        return self._layers[key]

    def _layer(self, layout: ParallelLayout) -> LayerCost:
        model, device, t = self.model, self.device, layout.tp
        element, mask = device.element, MASK * device.dropout
        h, tokens = model.hidden, layout.micro_batch * model.seq // layout.cp
        keys, inner = model.key_size(t), model.inner
        projected = h + 2 * keys  # queries, keys and values
        gemm = sum(
            self.product(tokens, *sizes)
            for sizes in ((projected // t, h), (h, h // t), (inner // t, h), (h, inner // t))
        )
        # Bytes of a token's element that kernels read and write. Outside the shards of tp, forward: two norms, the sums
        # of two residual branches and their masks; backward: gradients of input and weights of the norms, of the
        # branches, of their biases, and the sums where branches begin.
        shards = t if layout.sequence_parallel else 1
        outside = tokens * h / shards
        outside_forward, outside_backward = outside * (10 * element + 2 * mask), outside * (22 * element + 2 * mask)
        # Inside, forward: the GELU reads and writes its sizes, transposes those of query, key, value and attention's
        # output; backward: the GELU 3, the same transposes, sums for the biases.
        transposes = 2 * (projected + h)
        inside_forward, inside_backward = (
            tokens / t * each * element for each in (2 * inner + transposes, 4 * inner + transposes + projected)
        )
        elementwise, elementwise_backward = (
            each / self.bandwidth for each in (outside_forward + inside_forward, outside_backward + inside_backward)
        )
        attention, attention_backward = self.attention(layout)
        collectives, passing, hops = self.tensor_parallel(layout), self.passing(layout), layout.cp - 1
        exposed = hops * max(0.0, passing - attention / layout.cp)
        # In backward keys and values travel again, and their gradients in float32.
        exposed_backward = hops * max(0.0, (1 + 4 / element) * passing - attention_backward / layout.cp)
        launch = device.calibration.launch
        if device.asynchronous:
            launch = max(0.0, launch - gemm - attention - elementwise - collectives - exposed)
        forward = Passes(gemm, attention, elementwise, launch, collectives, exposed)
        backward = Passes(2 * gemm, attention_backward, elementwise_backward, 2 * launch, collectives, exposed_backward)
        again = {"none": 0.0, "selective": attention, "full": sum(forward)}[layout.recompute]
        return LayerCost(forward, backward, again)

    def product(self, rows: float, columns: float, depth: float, count: float = 1) -> float:
        """Return the seconds of `count` matrix products, (rows, depth) times (depth, columns).

        Tiles of C are computed in waves of one on each multiprocessor; a wave takes its time even if it is not full.
        The matrices are read and written once.
        """
        device = self.device
        computed = min(
            ceil(ceil(rows / tall) * ceil(columns / wide) * count / device.sms) * device.sms * tall * wide
            for tall, wide in (device.tile, device.tile[::-1])
        )
        moved = count * device.element * (rows * depth + depth * columns + rows * columns)
        return 2 * computed * depth / self.flops + moved / self.bandwidth

    def attention(self, layout: ParallelLayout) -> tuple[float, float]:
        """Return the seconds of attention without its linear layers, forward and backward."""
        model, element, mask = self.model, self.device.element, MASK * self.device.dropout
        heads = layout.micro_batch * model.heads / layout.tp
        width = model.hidden / model.heads
        if stores_scores(layout, self.device):
            products = self.product(model.seq, model.seq, width, heads) + self.product(
                model.seq, width, model.seq, heads
            )
            # Softmax and dropout read and write the scores; backward reads the output of the softmax too.
            scores = heads * model.seq**2
            dropout = self.device.dropout * (2 * element + mask)
            forward, backward = (scores * (each * element + dropout) / self.bandwidth for each in (2, 3))
            return products + forward, 2 * products + backward
        flops = 4 * heads * model.seq * (model.seq / layout.cp) * width * CAUSAL
        # Query, key, value and output once; backward their gradients too.
        size = 2 * (model.hidden + model.key_size(layout.tp)) / layout.tp
        moved = element * layout.micro_batch * model.seq / layout.cp * size
        forward, moving = flops / (self.device.flops * self.device.fused), moved / self.bandwidth
        return forward + moving, FUSED_BACKWARD * forward + 2 * moving

    def tensor_parallel(self, layout: ParallelLayout) -> float:
        """Return the seconds of the collectives in a layer's forward, or in its backward: two all-reduces.

        With sequence parallelism they are two all-gathers and two reduce-scatters, which send as much.
        """
        size = payloads(self.model, layout, self.device.element).block
        names = ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("all_reduce",)
        return 2 * sum(self.collective(name, size, layout.tp, 1) for name in names)

    def passing(self, layout: ParallelLayout) -> float:
        """Return the seconds in which keys and values go one rank further in ring attention."""
        if layout.cp == 1:
            return 0.0
        latency, byte_time = self.link(layout.cp, layout.tp)
        return latency + byte_time * payloads(self.model, layout, self.device.element).keys

    # --- Communication ------------------------------------------------------------------------------------------------

    def collective(self, name: str, size: int, ranks: int, stride: int) -> float:
        """Return the seconds of a collective with `size` bytes in the larger array.

        Args:
            name: a collective of `ringcomm.algorithms`; its cheapest algorithm is taken
            size: bytes
            ranks: ranks of the group
            stride: distance between neighbors of the group
        """
        if ranks == 1:
            return 0.0
        key = name, size, ranks, stride
        if key not in self._collectives:
            in_node = min(ranks, max(1, self.node // stride))
            # GPUs reduce while they receive, so reducing costs nothing beside.
            cluster = Cluster(self.inside, self.link(ranks, stride), 0, in_node)
            algorithm = select(name, ranks, size // self.device.element, self.device.element, cluster)
            self._collectives[key] = closed_form(algorithm, ranks, size, 1, cluster)
        return self._collectives[key]

    def link(self, ranks: int, stride: int) -> LinkCost:
        """Return the link that carries a group's messages, shared with the groups of other ranks of the node."""
        if ranks * stride <= self.node:
            return self.inside
        in_node = min(ranks, max(1, self.node // stride))
        latency, byte_time = self.between
        return LinkCost(latency, max(self.inside.byte_time, byte_time / in_node))
