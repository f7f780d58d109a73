"""Attention to a block of the keys, in a form from which the attention to all keys can be merged.

Attention to several blocks is the mean of their outputs, weighted by the exponentials of the log-sum-exps of their
scores. The backward of a block needs only the output and the log-sum-exp of the whole (Dao et al., FlashAttention,
arXiv 2205.14135).

Shapes: queries are (N, G, S, D); keys and values, stacked, are (2, N, 1, T, D), the same for the G heads. `causal` lets
query i attend to the keys up to i. Sums are in float32, or float64 for float64.

A block runs in torch's FlashAttention on a CPU, and on GPUs in 16 bits. It stores no scores, and on a CPU takes half
the time of matrix products, which serve everywhere else and store G · S · T scores.
"""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

__all__ = ["accumulation_dtype", "attend", "attend_backward", "merge"]

aten = torch.ops.aten


def accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def attend(query: Tensor, key_value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output (N, G, S, D) and the log-sum-exp (N, G, S) of a block."""
    key, value = key_value.expand(-1, -1, query.shape[1], -1, -1)
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    elif can_flash(query, key, value, causal):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    else:
        out, lse = attend_by_matmul(query, key_value, causal, scale)
    return out, lse


def attend_backward(
    grad: Tensor, query: Tensor, out: Tensor, lse: Tensor, key_value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's part of the gradients of queries, keys and values.

    `out` and `lse` are those of all keys; `grad` is the gradient of `out`.
    """
    key, value = key_value.expand(-1, -1, query.shape[1], -1, -1)
    whole = grad, query, key, value, out, lse.contiguous()
    if query.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*whole, 0.0, causal, scale=scale)
    elif can_flash(query, key, value, causal):
        seed = query.new_empty((), dtype=torch.int64)  # of no dropout
        ends = None, None, query.shape[2], key.shape[2]  # all sequences of a batch have one length
        grads = aten._scaled_dot_product_flash_attention_backward(*whole, *ends, 0.0, causal, seed, seed, scale=scale)
    else:
        grads = attend_by_matmul_backward(grad, query, out, lse, key_value, causal, scale)
    wide, shape = accumulation_dtype(query), key_value.shape[1:]
    grad_query, grad_key, grad_value = (each.to(wide) for each in grads)
    return grad_query, grad_key.sum_to_size(shape), grad_value.sum_to_size(shape)


def merge(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """Add a block to the output and log-sum-exp of others, in place."""
    out.lerp_(block.to(out.dtype), torch.sigmoid(block_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


def can_flash(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    whole = query.shape[-1] % 8 == 0  # torch pads other heads outside the kernel
    return whole and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, causal, False))


def attend_by_matmul(query: Tensor, key_value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key_value[0], causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ key_value[1].to(lse.dtype), lse


def attend_by_matmul_backward(
    grad: Tensor, query: Tensor, out: Tensor, lse: Tensor, key_value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(query, key_value[0], causal, scale) - lse.unsqueeze(-1)).exp()
    grad, query, out, key_value = (each.to(weights.dtype) for each in (grad, query, out, key_value))
    grad_scores = (grad @ key_value[1].mT - (grad * out).sum(-1, keepdim=True)) * weights * scale
    return grad_scores @ key_value[0], grad_scores.mT @ query, weights.mT @ grad


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    wide = accumulation_dtype(query)
    scores = query.to(wide) @ key.to(wide).mT * scale
    after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(after, -torch.inf) if causal else scores
