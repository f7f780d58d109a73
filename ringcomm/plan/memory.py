"""The memory of a rank: states by ZeRO stage, activations in flight, and the largest temporary tensors.

States: Rajbhandari et al., ZeRO (arXiv 1910.02054), figure 1. Activations: Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models (arXiv 2205.05198), equations 2 to 6. Micro-batches in flight: the table of
`ringcomm.parallel.schedule`. With elements of 2 bytes and dropout the formulas are the papers'.
"""

from typing import NamedTuple

from ringcomm.plan.devices import Accelerator
from ringcomm.plan.layout import ParallelLayout
from ringcomm.plan.model import Transformer

__all__ = ["MemoryUse", "in_flight", "layer_activations", "memory_use", "stage_parameters", "states"]

MASTERS = 12  # bytes of a parameter's master and two moments of Adam in float32; with float32 parameters, 8
MASTER_GRADIENT = 4  # bytes of the float32 gradient that the optimizer of 16-bit parameters reads
MASK = 1  # bytes of an element of a dropout mask


class MemoryUse(NamedTuple):
    """Bytes of a rank.

    Attributes:
        parameters: the parameters
        gradients: their gradients
        optimizer: float32 masters and the moments of Adam
        activations: what forwards keep for their backwards
        temporary: the largest of: logits and their gradients; what a layer recomputes; gradients of the masters, less
            the activations, which are free by then
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float

    @property
    def total(self) -> float:
        return sum(self)


def memory_use(model: Transformer, layout: ParallelLayout, device: Accelerator, batch: int, rank: int) -> MemoryUse:
    """Return the memory of pipeline rank `rank`."""
    element = device.element
    parameters = stage_parameters(model, layout, rank)
    values, gradients, optimizer = states(parameters, layout.dp * layout.cp, layout.zero, element)
    tokens = layout.micro_batch * model.seq // layout.cp
    per_chunk = model.layers // (layout.pp * layout.chunks) * layer_activations(model, layout, device)
    activations = in_flight(layout, batch, rank) * per_chunk
    temporary = 0.0
    if rank == layout.pp - 1:
        # Logits and their gradient in float32, and the gradient in 16 bits; input and output of the last norm.
        rows = model.embedding_parameters(layout.tp) / model.hidden
        temporary = tokens * (rows * (8 + element) + 2 * element * model.hidden)
    if layout.recompute != "none":
        kept = layer_activations(model, layout, device) if layout.recompute == "selective" else 0
        temporary = max(temporary, layer_activations(model, layout, device, "none") - kept)
    if element < 4:
        share = layout.dp * layout.cp if layout.zero else 1
        temporary = max(temporary, MASTER_GRADIENT * parameters / share - activations)
    return MemoryUse(values, gradients, optimizer, activations, temporary)


def states(parameters: float, replicas: int, zero: int, element: int = 2) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer states of a rank.

    With 2-byte elements, Ψ parameters and d replicas they sum up to 16Ψ (stage 0), 4Ψ + 12Ψ/d (stage 1),
    2Ψ + 14Ψ/d (stage 2) and 16Ψ/d (stage 3).
    """
    shared = [1 / replicas if zero >= stage else 1 for stage in (3, 2, 1)]
    masters = MASTERS if element < 4 else MASTERS - 4
    values, gradients, optimizer = (
        parameters * size * share for size, share in zip((element, element, masters), shared, strict=True)
    )
    return values, gradients, optimizer


def stage_parameters(model: Transformer, layout: ParallelLayout, rank: int) -> int:
    """Return the parameters of pipeline rank `rank`: its layers, and at the ends of the pipeline the embedding.

    The first stage has positions too, the last the final norm. The two copies of the embedding are tied.
    """
    first, last = rank == 0, rank == layout.pp - 1
    parameters = model.layers // layout.pp * model.layer_parameters(layout.tp)
    parameters += (first or last) * model.embedding_parameters(layout.tp)
    return parameters + first * model.seq * model.hidden + last * 2 * model.hidden


def in_flight(layout: ParallelLayout, batch: int, rank: int) -> int:
    """Return the most chunk activations that pipeline rank `rank` holds at once."""
    m, p, v = layout.micro_batches(batch), layout.pp, layout.chunks
    return min(m, p - rank) if v == 1 else min(m * v, (v + 1) * p - 2 * rank - 1)


def layer_activations(
    model: Transformer, layout: ParallelLayout, device: Accelerator, recompute: str | None = None
) -> float:
    """Return the bytes that the forward of a layer keeps for one micro-batch.

    In sbh, with 2-byte elements, dropout and stored scores: 10 + 24/t + 5as/ht; with sequence parallelism
    (34 + 5as/h)/t; without 5as/ht if attention is fused or recomputed (selective); 2, or 2/t with sequence parallelism,
    with full recomputation.
    """
    recompute = recompute or layout.recompute
    element, mask = device.element, MASK * device.dropout
    tokens = layout.micro_batch * model.seq // layout.cp
    sequence_shards = layout.tp if layout.sequence_parallel else 1
    if recompute == "full":
        return element * tokens * model.hidden / sequence_shards
    # Inputs and outputs of both norms, and the masks of both residual branches.
    outside = (4 * element + 2 * mask) / sequence_shards
    # Query, key, value, the input of the projection, and input and output of the GELU.
    inside = 2 * element * (model.hidden + model.key_size(layout.tp) + model.inner) / layout.tp
    kept = tokens * (model.hidden * outside + inside)
    if stores_scores(layout, device) and recompute != "selective":
        # Output of the softmax, of dropout, and its mask.
        per_score = element + (element + mask) * device.dropout
        kept += per_score * layout.micro_batch * model.heads * model.seq**2 / layout.tp
    return kept


def stores_scores(layout: ParallelLayout, device: Accelerator) -> bool:
    """Return whether attention keeps its scores. Ring attention does not."""
    return device.attention == "unfused" and layout.cp == 1
