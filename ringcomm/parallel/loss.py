"""Cross-entropy of logits that are cut over the vocabulary, without putting them together."""

from typing import Any

import torch
import torch.distributed as dist

from ringcomm.errors import refuse
from ringcomm.parallel.functional import summed
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.tensor import check_ids

__all__ = ["vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    tp: Axis,
    *,
    vocabulary: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the mean cross-entropy, on every rank: what `torch.nn.functional.cross_entropy` says of the whole logits.

    With the largest logit m, Z = Σ exp(x - m), the target's logit y and smoothing e, a token's loss is
    log Z + m - (1 - e) · y - e · mean(x). Logits of 16 bits are computed with in float32.

    Forward: all-reduces of m, then of Z, y and, with smoothing, Σ x together: 2 · (t-1)/t times 3, or 4, numbers a
    token, while the logits are `vocabulary` numbers a token. Backward: nothing, each rank knows its own gradients.

    Args:
        logits: (..., share) those of this rank's part of the vocabulary; share · t ≥ vocabulary, the rest is padding
        targets: (...) ids, the same on every rank
        tp: the ranks among which the vocabulary is cut
        vocabulary: how many ids there are; None if there is no padding
        label_smoothing: the share of the target's weight that is spread over the vocabulary, from 0 to 1
        ignore_index: the target that does not count; if none counts, the mean is nan

    Raises:
        ArgumentError: shapes that do not fit, or, on a CPU, targets outside of the vocabulary (on a GPU torch's own
            kernel stops then)
    """
    share = logits.shape[-1]
    vocabulary = share * tp.size if vocabulary is None else vocabulary
    if logits.shape[:-1] != targets.shape:
        raise refuse("the shape of the targets", tuple(logits.shape[:-1]), tuple(targets.shape))
    if not share * (tp.size - 1) < vocabulary <= share * tp.size:
        raise refuse(
            "the vocabulary",
            f"{share * (tp.size - 1) + 1} to {share * tp.size}, for {tp.size} · {share} logits",
            vocabulary,
        )
    if not 0 <= label_smoothing <= 1:
        raise refuse("label_smoothing", "a number from 0 to 1", label_smoothing)
    check_ids("targets", targets.where(targets != ignore_index, 0), vocabulary)
    loss: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, -2), targets.flatten(), tp, vocabulary, label_smoothing, ignore_index
    )
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, tp: Axis, vocabulary: int, smoothing: float, ignored: int
    ) -> torch.Tensor:
        start = tp.rank * logits.shape[-1]
        real = min(logits.shape[-1], vocabulary - start)  # what follows is padding
        x = logits[:, :real].to(torch.promote_types(logits.dtype, torch.float32))
        largest = summed(x.amax(-1), tp, dist.ReduceOp.MAX)
        x = x - largest.unsqueeze(-1)
        local = targets - start
        here = (local >= 0) & (local < real)
        counts = targets != ignored
        elsewhere = ~here & (~counts | ((targets >= 0) & (targets < vocabulary)))
        column = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        target = x.gather(-1, column).squeeze(-1).masked_fill(~here, 0)
        sums = [target, x.exp().sum(-1), *([x.sum(-1)] if smoothing else [])]
        target, normalizer, *total = summed(torch.stack(sums), tp)
        loss = normalizer.log() - (1 - smoothing) * target
        if smoothing:
            loss = loss - smoothing / vocabulary * total[0]
        mean: torch.Tensor = loss.where(counts, 0).sum() / counts.sum()

        ctx.save_for_backward(x, normalizer, column, here, counts)
        ctx.shape, ctx.dtype, ctx.vocabulary, ctx.smoothing = logits.shape, logits.dtype, vocabulary, smoothing
        return mean

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, normalizer, column, here, counts = ctx.saved_tensors
        probabilities = x.exp().div_(normalizer.unsqueeze(-1))
        probabilities -= ctx.smoothing / ctx.vocabulary
        probabilities.scatter_add_(-1, column, (ctx.smoothing - 1) * here.to(x.dtype).unsqueeze(-1))
        probabilities *= (grad / counts.sum() * counts).unsqueeze(-1)
        out = torch.zeros(ctx.shape, dtype=ctx.dtype, device=x.device)  # padding has no gradient
        out[:, : x.shape[-1]] = probabilities
        return out, None, None, None, None, None
