"""What ranks send: the payload of each collective and message, and the bytes of a step on each axis.

A ring sends 2(n-1)/n times the payload in an all-reduce of n ranks, half as much in an all-gather or reduce-scatter.
"""

from typing import NamedTuple

from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.transformer import Transformer
from ringcomm.plan.price.memory import ROUTER, replicated

__all__ = ["Payloads", "bytes_sent", "payloads"]

LOSS = 3 * 4  # bytes of a token in the all-reduces of the loss: three numbers in float32
COUNT = 8  # bytes of the number of tokens for an expert


class Payloads(NamedTuple):
    """Bytes of one call, on one rank.

    Attributes:
        block: of a collective of tensor parallelism: the activations of a micro-batch, b·s·h elements
        keys: of a hop of ring attention: this rank's keys and values
        choices: of an all-to-all between experts: a row of h elements for each expert of each token
        gradients: of the reductions of gradients: the rank's parameters, and the replicas of each part
        tied: of the all-reduce between the two copies of the embedding
    """

    block: int
    keys: int
    choices: int
    gradients: list[tuple[int, int]]
    tied: int


def payloads(model: Transformer, layout: ParallelLayout, element: int, rank: int = 0) -> Payloads:
    """Return the payloads of pipeline rank `rank`; `element` is the bytes of an element."""
    block = element * layout.micro_batch * model.seq // layout.cp * model.hidden
    gradients = [(element * count, replicas) for count, replicas in replicated(model, layout, rank)]
    keys = 2 * block // model.hidden * model.key_size(layout.tp) // layout.tp
    choices = model.top_k * block if model.experts else 0
    return Payloads(block, keys, choices, gradients, element * model.embedding_parameters(layout.tp))


def bytes_sent(model: Transformer, layout: ParallelLayout, element: int, batch: int, rank: int = 0) -> dict[str, float]:
    """Return the bytes that pipeline rank `rank` sends in a step on each axis of `Grid`, with rings.

    tp: 2 all-reduces in a layer's forward and 2 in its backward, those of the embedding's forward on the first stage,
    and of the loss and the gradient of its input on the last. Full recomputation adds 1: torch's `checkpoint` stops
    before the second, which nothing needs. (Megatron-LM repeats both, and the cost of a step has both.) cp: K and V in
    the forward of ring attention; in backward these and their gradients in float32. pp: an activation or a gradient for
    each micro-batch and chunk, b·s·h elements, shared by the tp ranks with sequence parallelism. dp: gradients,
    2Ψ(d-1)/d elements; with stage 3 of ZeRO, 3Ψ(d-1)/d in each micro-batch. ends: the gradients of the tied embedding.

    With experts, if tokens use all equally. ep: each choice of a token travels to its expert and back, in forward and
    in backward, after counts in forward. tp also: all-reduces of the gradients of the router's T·E logits, of biases of
    experts and, with sequence parallelism, of the router.
    """
    m, first, last = layout.micro_batches(batch), rank == 0, rank == layout.last_rank
    block, keys, choices, gradients, tied = payloads(model, layout, element, rank)
    layers = model.layers // layout.pp
    repeated = layout.recompute == "full"
    tokens = layout.micro_batch * model.seq // layout.cp
    reduced = ((4 + repeated) * layers + first + last) * block + last * LOSS * tokens
    if model.experts:
        weights = model.experts // layout.ep + model.experts * layout.sequence_parallel
        reduced += layers * (ROUTER * tokens * model.experts + element * weights * model.hidden)
    exchanged = layers * ((4 + 2 * repeated) * choices + (1 + repeated) * COUNT * model.experts)
    hops = layers * (layout.cp - 1) * (2 + repeated + 4 / element)
    messages = 2 * layout.chunks - first - last
    if layout.schedule == "zbv" and rank == layout.pp - 1:
        messages -= 2  # both of its stages follow each other
    return {
        "tp": m * _all_reduce(reduced, layout.tp),
        "cp": m * hops * keys,
        "ep": m * (layout.ep - 1) / layout.ep * exchanged,
        "pp": m * messages * block / (layout.tp if layout.sequence_parallel else 1),
        "dp": sum(_all_reduce(size, replicas) for size, replicas in gradients) * (1.5 * m if layout.zero == 3 else 1),
        "ends": _all_reduce(tied, 2) if first is not last else 0.0,
    }


def _all_reduce(payload: float, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * payload
