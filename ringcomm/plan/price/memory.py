"""The memory of a rank: states by ZeRO stage, activations in flight, and the largest temporary tensors.

States: Rajbhandari et al., ZeRO (arXiv 1910.02054), figure 1. Activations: Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models (arXiv 2205.05198), equations 2 to 6. Micro-batches in flight: the table of
`ringcomm.pipelining.schedule`. With elements of 2 bytes and dropout the formulas are the papers'. What gradients need
beyond the papers is that of `ringcomm.parallel`, and of torch's `fully_shard` for stage 3.
"""

from typing import NamedTuple

from ringcomm.plan.model.devices import Accelerator
from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.transformer import Transformer

__all__ = ["MemoryUse", "in_flight", "layer_activations", "memory_use", "replicated", "stage_parameters", "states"]

MASTERS = 12  # bytes of a parameter's master and two moments of Adam in float32; with float32 parameters, 8
MASTER_GRADIENT = 4  # bytes of the float32 gradient that the optimizer reads: of masters, and in MixedPrecision of all
MASK = 1  # bytes of an element of a dropout mask
ROUTER = 4  # bytes of an element in a router, which computes in float32
BUCKET = 25 << 20  # bytes of parameters at which ShardedOptimizer ends a bucket


class MemoryUse(NamedTuple):
    """Bytes of a rank.

    Attributes:
        parameters: the parameters
        gradients: their gradients, as replicas reduce and keep them
        accumulated: gradients of earlier micro-batches, which the last backward adds to them
        optimizer: float32 masters and the moments of Adam
        activations: what forwards keep for their backwards
        temporary: the largest of: logits and their gradients; what a layer recomputes; gradients of the masters, less
            what is free by then. In stage 3 of ZeRO also the layers and the embedding that are gathered
    """

    parameters: float
    gradients: float
    accumulated: float
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
    values = gradients = optimizer = accumulated = buffers = masters = 0.0
    for count, replicas in replicated(model, layout, rank):
        held = states(count, replicas, layout.zero, element)
        values, gradients, optimizer = values + held[0], gradients + held[1], optimizer + held[2]
        masters += count / replicas if layout.zero else count
        if layout.micro_batches(batch) > 1 and replicas > 1 and layout.zero < 3:
            # In stage 2 the shards take their place. Float32 parameters keep the shards' memory from step to step.
            accumulated += element * count - (held[1] if layout.zero == 2 and element < 4 else 0)
    if layout.zero == 2:  # two buffers, lent to one bucket after another
        largest = max(model.hidden * model.inner // layout.tp, model.embedding_parameters(layout.tp))
        buffers = 2 * min(element * parameters, BUCKET + element * largest)
    per_chunk = model.layers // (layout.pp * layout.chunks) * layer_activations(model, layout, device)
    activations = in_flight(layout, batch, rank) * per_chunk
    free = activations + accumulated + (gradients if layout.zero == 2 else 0)  # which frees what is converted
    temporary = _temporary(model, layout, device, batch, rank)
    if layout.zero == 0 or (element < 4 and layout.zero < 3):
        temporary = max(temporary, MASTER_GRADIENT * masters - free)
    if layout.zero == 3:
        temporary += _gathered(model, layout, element, rank)
    return MemoryUse(values, gradients + buffers, accumulated, optimizer, activations, temporary)


def _temporary(model: Transformer, layout: ParallelLayout, device: Accelerator, batch: int, rank: int) -> float:
    """Return the bytes of logits and their gradients, or of what a layer recomputes: the larger."""
    element, temporary = device.element, 0.0
    if rank == layout.last_rank:
        # Logits and their gradient in float32. For the gradients of weights, which zb-h1 leaves for the end: the
        # gradient in 16 bits, and input and output of the last norm.
        rows = model.embedding_parameters(layout.tp) / model.hidden
        waiting = in_flight(layout, batch, rank) if layout.schedule == "zb-h1" else 1
        tokens = layout.micro_batch * model.seq // layout.cp
        temporary = tokens * (rows * 8 + waiting * element * (rows + 2 * model.hidden))
    if layout.recompute != "none":
        kept = layer_activations(model, layout, device) if layout.recompute == "selective" else 0
        temporary = max(temporary, layer_activations(model, layout, device, "none") - kept)
    return temporary


def _gathered(model: Transformer, layout: ParallelLayout, element: int, rank: int) -> float:
    """Return the bytes of what stage 3 of ZeRO gathers.

    Parameters of two layers, one of them ahead of its use; gradients of one, and their copy that is reduced. The
    embedding stays gathered, with its gradient.
    """
    embedding = 2 * model.embedding_parameters(1) if rank in (0, layout.last_rank) else 0
    return element * (4 * model.layer_parameters(1) + embedding)


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
    first, last = rank == 0, rank == layout.last_rank
    parameters = model.layers // layout.pp * model.layer_parameters(layout.tp, layout.ep)
    parameters += (first or last) * model.embedding_parameters(layout.tp)
    return parameters + first * model.seq * model.hidden + last * 2 * model.hidden


def replicated(model: Transformer, layout: ParallelLayout, rank: int) -> list[tuple[int, int]]:
    """Return the parameters of pipeline rank `rank` in parts, each with the number of its replicas.

    The second part are the experts, if there are any.
    """
    parameters, replicas = stage_parameters(model, layout, rank), layout.dp * layout.cp
    experts = model.layers // layout.pp * model.expert_parameters(layout.tp, layout.ep)
    return [(parameters - experts, replicas), (experts, replicas // layout.ep)][: 2 if experts else 1]


def in_flight(layout: ParallelLayout, batch: int, rank: int) -> int:
    """Return the most chunk activations that pipeline rank `rank` holds at once."""
    m, p, v = layout.micro_batches(batch), layout.pp, layout.chunks
    return {
        "1f1b": min(m, p - rank),
        "interleaved": min(m * v, (v + 1) * p - 2 * rank - 1),
        "zb-h1": min(m, p),
        "zbv": min(2 * m, 2 * p, m + 1 + rank),
    }[layout.schedule]


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
    # Query, key, value, the input of the projection, and input and output of the GELU; of a gated MLP also the other
    # factor and the product.
    mlp = 2 * (model.matrices - 1) * model.inner / layout.tp
    if model.experts:
        # For each choice the input and the result of the expert; of the router its input and probabilities.
        router = ROUTER * (model.experts + (element < ROUTER) * model.hidden / sequence_shards)
        mlp = model.top_k * (mlp + 2 * model.hidden) + router / element
    inside = element * (2 * (model.hidden + model.key_size(layout.tp)) / layout.tp + mlp)
    kept = tokens * (model.hidden * outside + inside)
    if stores_scores(layout, device) and recompute != "selective":
        # Output of the softmax, of dropout, and its mask.
        per_score = element + (element + mask) * device.dropout
        kept += per_score * layout.micro_batch * model.heads * model.seq**2 / layout.tp
    return kept


def stores_scores(layout: ParallelLayout, device: Accelerator) -> bool:
    """Return whether attention keeps its scores. Ring attention does not."""
    return device.attention == "unfused" and layout.cp == 1
