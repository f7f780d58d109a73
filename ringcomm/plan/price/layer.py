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
        gemm = self.products(layout)
        attention, attention_backward = self.attention(layout)
        elementwise, elementwise_backward = self.elementwise(layout)
        collectives, exchanged = self.collectives(layout)
        exposed, exposed_backward = self.ring(layout, attention, attention_backward)
        launch = self.device.calibration.launch
        if self.device.asynchronous:
            launch = max(0.0, launch - gemm - attention - elementwise - collectives - exposed - exchanged)
        forward = Passes(gemm, attention, elementwise, launch, collectives, exposed, exchanged)
        backward = Passes(
            2 * gemm, attention_backward, elementwise_backward, 2 * launch, collectives, exposed_backward, exchanged
        )
        again = {"none": 0.0, "selective": attention, "full": sum(forward)}[layout.recompute]
        return LayerCost(forward, backward, again)

    def products(self, layout: ParallelLayout) -> float:
        """Return the seconds of a forward's linear layers."""
        model, h, t, inner = self.model, self.model.hidden, layout.tp, self.model.inner
        tokens = layout.micro_batch * model.seq // layout.cp
        seconds = self.product(tokens, self._projected(t) // t, h) + self.product(tokens, h, h // t)
        # One expert after another: each has an equal part of the choices of the ranks of ep.
        mlps, rows = 1, float(tokens)
        if model.experts:
            mlps, rows = model.experts // layout.ep, tokens * model.top_k * layout.ep / model.experts
            seconds += self.product(tokens, model.experts, h)
        columns = model.matrices - 1
        return seconds + mlps * (columns * self.product(rows, inner // t, h) + self.product(rows, h, inner // t))

    def elementwise(self, layout: ParallelLayout) -> tuple[float, float]:
        """Return the seconds of elementwise kernels, forward and backward."""
        model, element, mask = self.model, self.device.element, MASK * self.device.dropout
        tokens = layout.micro_batch * model.seq // layout.cp
        # Bytes of a token's element that kernels read and write. Outside the shards of tp, forward: two norms, the sums
        # of two residual branches and their masks; backward: gradients of input and weights of the norms, of the
        # branches, of their biases, and the sums where branches begin.
        outside = tokens * model.hidden / (layout.tp if layout.sequence_parallel else 1)
        # Inside, forward: the GELU reads and writes its sizes, transposes those of query, key, value and attention's
        # output; backward: the GELU 3, the same transposes, sums for the biases. The product of a gated MLP has 3, and
        # 5 with another bias.
        choices, projected = model.top_k if model.experts else 0, self._projected(layout.tp)
        transposes, activated = 2 * (projected + model.hidden), (choices or 1) * model.inner
        inside = (2 + 3 * model.gated) * activated + transposes
        inside_backward = (4 + 6 * model.gated) * activated + transposes + projected
        # Every rank of tp moves a token's rows for its experts: sorts, joins and splits them, weights and adds them up.
        moved = CHOICE_MOVES * tokens * choices * model.hidden * element
        forward = outside * (10 * element + 2 * mask) + (tokens / layout.tp * inside * element + moved)
        backward = outside * (22 * element + 2 * mask) + (tokens / layout.tp * inside_backward * element + moved)
        return forward / self.bandwidth, backward / self.bandwidth

    def collectives(self, layout: ParallelLayout) -> tuple[float, float]:
        """Return the seconds of collectives over tp, and of exchanges over ep, in each direction."""
        size = payloads(self.model, layout, self.device.element)
        # Two all-reduces; with sequence parallelism two all-gathers and two reduce-scatters, which send as much.
        names = ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("all_reduce",)
        seconds = 2 * sum(self.network.collective(name, size.block, layout.tp, 1) for name in names)
        return seconds, 2 * self.network.collective("all_to_all", size.choices, layout.ep, layout.tp * layout.cp)

    def ring(self, layout: ParallelLayout, attention: float, attention_backward: float) -> tuple[float, float]:
        """Return the seconds of ring attention's messages that attention does not hide, forward and backward.

        Keys and values go round beside the attention to those that have arrived. In backward they travel again, and
        their gradients in float32.
        """
        hops, (latency, byte_time) = layout.cp - 1, self.network.hop(layout.cp, layout.tp)
        passing = latency + byte_time * payloads(self.model, layout, self.device.element).keys
        backward = (1 + 4 / self.device.element) * passing - attention_backward / layout.cp
        return hops * max(0.0, passing - attention / layout.cp), hops * max(0.0, backward)

    def _projected(self, tp: int) -> int:
        """Return the size of a token's query, key and value."""
        return self.model.hidden + 2 * self.model.key_size(tp)

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
