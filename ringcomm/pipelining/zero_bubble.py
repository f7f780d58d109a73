"""Zero-bubble schedules: a rank fills its idle time with the gradients of weights, for which no other rank waits.

After Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241). A backward has two parts: B computes the gradient
of a stage's input, which the previous stage needs; W computes those of its weights, at any later time. F is a forward.
Rank r of p runs the rows below; "F1" is the next micro-batch forward through its chunk 1.

**ZB-H1** is 1F1B with each W r micro-batches after its B. Three ranks, four micro-batches, equal times::

    rank 0  F F F . . B W F B W B W B W
    rank 1  . F F . B F B W F B W B W W
    rank 2  . . F B F B F B W F B W W W

With m ≥ p, a rank is idle for p - 1 units in all: r before its first F, p - 1 - r before its first B. In 1F1B it is
idle for 3(p - 1). In general these are (p - 1)(F + B - W), if W takes no longer than F and B, and (p - 1)(F + B + W).
Activations are live from F to W. Those are at most p micro-batches, as on the first rank of 1F1B, but on every rank.

**ZBV** gives rank r the stages r and 2p - 1 - r, so both ends of the model are on rank 0, and the first B follows the
last F at once. Two ranks, four micro-batches::

    rank 0  F0 F0 F0 F1 B1 W1 F1 B1 W1 F0 B0 W0 F1 B1 W1 B0 W0 F1 B1 W1 B0 W0 B0 W0
    rank 1  .  F0 F1 F0 F1 B1 W1 F0 B0 W0 F1 B1 W1 F0 B0 W0 F1 B1 W1 B0 B1 B0 W0 W1 W0

With m ≥ 2p - 1 and equal times no rank waits between its first and its last action: these are 6m units apart, which
the paper calls a zero bubble. Rank r begins r units after rank 0, so the whole takes 6m + p - 1. Activations of at most
2p chunks are live, as many layers as those of p micro-batches in 1F1B.
"""

from collections.abc import Iterator

__all__ = ["zb_h1", "zbv"]


def zb_h1(rank: int, ranks: int, micro_batches: int) -> Iterator[str]:
    """Yield a rank's row of ZB-H1."""
    warmup = min(ranks - 1 - rank, micro_batches)
    yield from ["F0"] * warmup
    for turn in range(micro_batches):
        if turn < micro_batches - warmup:
            yield "F0"
        yield "B0"
        if turn >= rank:
            yield "W0"
    yield from ["W0"] * rank


def zbv(rank: int, ranks: int, micro_batches: int) -> Iterator[str]:
    """Yield a rank's row of ZBV for at least 2 · ranks - 1 micro-batches, the number that fills the pipeline."""
    later = ranks - rank  # ranks from this one on
    micro_batches = max(micro_batches, 2 * ranks - 1)
    yield from ["F0"] * (2 * later - 1)
    yield from ["F1", "F0"] * rank
    yield from ["F1", "B1", "W1"] * later
    for turn in range(micro_batches - ranks):
        if turn < micro_batches - ranks - later + 1:
            yield "F0"
        yield from ["B0", "W0", "F1", "B1", "W1"]
    yield from ["B0", "B1"] * rank
    yield from ["B0", "W0"] * later
    yield from ["W1"] * rank
    yield from ["W0"] * rank
