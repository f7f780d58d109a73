"""The time of a layer's forward and backward for one micro-batch, in closed form.

A layer is matrix products at the rate of the device, elementwise kernels at the bandwidth of its memory, and
collectives at the prices of `ringcomm.algorithms`. docs/plan.md derives the figures.
"""

from math import ceil
from typing import NamedTuple

from ringcomm.plan.model.devices import Accelerator
from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.transformer import Transformer
from ringcomm.plan.price.interconnect import Interconnect
from ringcomm.plan.price.memory import MASK, stores_scores
from ringcomm.plan.price.traffic import payloads

__all__ = ["CAUSAL", "FUSED_BACKWARD", "LayerCost", "LayerPricing", "Passes"]

CAUSAL = 1 / 2  # share of the scores that fused attention computes
CHOICE_MOVES = 12  # times that `Experts` reads or writes a row, in forward and again in backward
FUSED_BACKWARD = 5 / 2  # products in backward for each in forward: five and two (Dao, arXiv 2307.08691, section 3.1)


class Passes(NamedTuple):
    """Seconds of a layer for one micro-batch."""

    gemm: float
    attention: float
    elementwise: float
    launch: float
    tp: float
    cp: float
    ep: float


class LayerCost(NamedTuple):
    """Seconds of a layer's forward, backward, and what backward computes again."""

    forward: Passes
    backward: Passes
    recompute: float


class LayerPricing:
    """Prices the layers of a model. It keeps those that layouts have in common."""

    def __init__(self, model: Transformer, device: Accelerator, network: Interconnect) -> None:
        self.model, self.device, self.network = model, device, network
        self.flops = device.flops * device.calibration.gemm
        self.bandwidth = device.bandwidth * device.calibration.memory
        self._costs: dict[tuple[object, ...], LayerCost] = {}

    def cost(self, layout: ParallelLayout) -> LayerCost:
        """Return the cost of a layer."""
        key = layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.sequence_parallel, layout.recompute
        if key not in self._costs:
            self._costs[key] = self._cost(layout)
        return self._costs[key]

    def _cost(self, layout: ParallelLayout) -> LayerCost:
        model, device, t = self.model, self.device, layout.tp
        element, mask = device.element, MASK * device.dropout
        h, tokens = model.hidden, layout.micro_batch * model.seq // layout.cp
        keys, inner = model.key_size(t), model.inner
        projected = h + 2 * keys  # queries, keys and values
        gemm = self.product(tokens, projected // t, h) + self.product(tokens, h, h // t)
        # One expert after another: each has an equal part of the choices of the ranks of ep.
        mlps, rows = 1, float(tokens)
        if model.experts:
            mlps, rows = model.experts // layout.ep, tokens * model.top_k * layout.ep / model.experts
            gemm += self.product(tokens, model.experts, h)
        columns = model.matrices - 1
        gemm += mlps * (columns * self.product(rows, inner // t, h) + self.product(rows, h, inner // t))
        # Bytes of a token's element that kernels read and write. Outside the shards of tp, forward: two norms, the sums
        # of two residual branches and their masks; backward: gradients of input and weights of the norms, of the
        # branches, of their biases, and the sums where branches begin.
        shards = t if layout.sequence_parallel else 1
        outside = tokens * h / shards
        outside_forward, outside_backward = outside * (10 * element + 2 * mask), outside * (22 * element + 2 * mask)
        # Inside, forward: the GELU reads and writes its sizes, transposes those of query, key, value and attention's
        # output; backward: the GELU 3, the same transposes, sums for the biases. The product of a gated MLP has 3, and
        # 5 with another bias.
        choices = model.top_k if model.experts else 0
        transposes, activated = 2 * (projected + h), (choices or 1) * inner
        inside_forward, inside_backward = (
            tokens / t * each * element
            for each in (
                (2 + 3 * model.gated) * activated + transposes,
                (4 + 6 * model.gated) * activated + transposes + projected,
            )
        )
        # Every rank of tp moves a token's rows for its experts: sorts, joins and splits them, weights and adds them up.
        moved = CHOICE_MOVES * tokens * choices * h * element
        inside_forward, inside_backward = inside_forward + moved, inside_backward + moved
        elementwise, elementwise_backward = (
            each / self.bandwidth for each in (outside_forward + inside_forward, outside_backward + inside_backward)
        )
        attention, attention_backward = self.attention(layout)
        # Two all-reduces; with sequence parallelism two all-gathers and two reduce-scatters, which send as much.
        size = payloads(model, layout, element)
        names = ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("all_reduce",)
        collectives = 2 * sum(self.network.collective(name, size.block, t, 1) for name in names)
        # Keys and values go round the ranks of ring attention, beside the attention to those that have arrived.
        hops, (latency, byte_time) = layout.cp - 1, self.network.hop(layout.cp, t)
        passing = latency + byte_time * size.keys
        exposed = hops * max(0.0, passing - attention / layout.cp)
        # In backward keys and values travel again, and their gradients in float32.
        exposed_backward = hops * max(0.0, (1 + 4 / element) * passing - attention_backward / layout.cp)
        exchanged = 2 * self.network.collective("all_to_all", size.choices, layout.ep, t * layout.cp)
        launch = device.calibration.launch
        if device.asynchronous:
            launch = max(0.0, launch - gemm - attention - elementwise - collectives - exposed - exchanged)
        forward = Passes(gemm, attention, elementwise, launch, collectives, exposed, exchanged)
        backward = Passes(
            2 * gemm, attention_backward, elementwise_backward, 2 * launch, collectives, exposed_backward, exchanged
        )
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
