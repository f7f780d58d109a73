"""Cross-entropy of logits sharded over the vocabulary, without gathering them."""

from typing import Any

import torch
import torch.distributed as dist

from ringcomm.errors import refuse
from ringcomm.parallel.collectives import all_reduced
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.tensor.layers import check_ids

__all__ = ["vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    tp: Axis,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the mean cross-entropy on every rank: `torch.nn.functional.cross_entropy` of the full logits.

    With the largest logit m, Z = Σ exp(x - m), the target's logit y and smoothing e, the loss of a token is
    log Z + m - (1 - e) · y - e · mean(x). Logits of 16 bits are converted to float32.

    Forward: all-reduces of m, then of Z, y and, with smoothing, Σ x: they send 2 · (t-1)/t times 3 (or 4) numbers per
    token, where the logits are `vocab_size` numbers per token. Backward: no communication.

    Args:
        logits: (..., V/t) this rank's shard; V is `vocab_size`, padded to a multiple of t
        targets: (...) token ids, the same on every rank
        tp: the ranks over which the vocabulary is sharded
        vocab_size: size of the vocabulary; None if there is no padding
        label_smoothing: part of the target's weight that is spread over the vocabulary, from 0 to 1
        ignore_index: target to ignore; if all are ignored, the mean is nan

    Raises:
        ArgumentError: shapes do not fit, or, on a CPU, a target is not in the vocabulary (on a GPU torch's kernel
            asserts).
    """
    local = logits.shape[-1]
    vocab_size = local * tp.size if vocab_size is None else vocab_size
    if logits.shape[:-1] != targets.shape:
        raise refuse("shape of the targets", tuple(logits.shape[:-1]), tuple(targets.shape))
    if not local * (tp.size - 1) < vocab_size <= local * tp.size:
        least, most = local * (tp.size - 1) + 1, local * tp.size
        raise refuse("vocab_size", f"{least} to {most}, for {tp.size} · {local} logits", vocab_size)
    if not 0 <= label_smoothing <= 1:
        raise refuse("label_smoothing", "a number from 0 to 1", label_smoothing)
    check_ids("targets", targets.where(targets != ignore_index, 0), vocab_size)
    loss: torch.Tensor = _CrossEntropy.apply(
        logits.flatten(0, -2), targets.flatten(), tp, vocab_size, label_smoothing, ignore_index
    )
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, tp: Axis, vocab_size: int, smoothing: float, ignored: int
    ) -> torch.Tensor:
        start = tp.rank * logits.shape[-1]
        length = min(logits.shape[-1], vocab_size - start)  # the rest is padding
        x = logits[:, :length].to(torch.promote_types(logits.dtype, torch.float32))
        largest = all_reduced(x.amax(-1), tp, dist.ReduceOp.MAX)
        x = x - largest.unsqueeze(-1)
        local = targets - start
        here = (local >= 0) & (local < length)
        counts = targets != ignored
        elsewhere = ~here & (~counts | ((targets >= 0) & (targets < vocab_size)))
        column = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        target = x.gather(-1, column).squeeze(-1).masked_fill(~here, 0)
        sums = [target, x.exp().sum(-1), *([x.sum(-1)] if smoothing else [])]
        target, normalizer, *total = all_reduced(torch.stack(sums), tp)
        loss = normalizer.log() - (1 - smoothing) * target
        if smoothing:
            loss = loss - smoothing / vocab_size * total[0]
        mean: torch.Tensor = loss.where(counts, 0).sum() / counts.sum()

        ctx.save_for_backward(x, normalizer, column, here, counts)
        ctx.shape, ctx.dtype, ctx.vocab_size, ctx.smoothing = logits.shape, logits.dtype, vocab_size, smoothing
        return mean

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, normalizer, column, here, counts = ctx.saved_tensors
        probabilities = x.exp().div_(normalizer.unsqueeze(-1))
        probabilities -= ctx.smoothing / ctx.vocab_size
        probabilities.scatter_add_(-1, column, (ctx.smoothing - 1) * here.to(x.dtype).unsqueeze(-1))
        factor = grad / counts.sum().clamp(min=1) * counts  # zero if all are ignored, as in torch
        probabilities *= factor.unsqueeze(-1)
        out = torch.zeros(ctx.shape, dtype=ctx.dtype, device=x.device)  # padding has no gradient
        out[:, : x.shape[-1]] = probabilities
        return out, None, None, None, None, None
