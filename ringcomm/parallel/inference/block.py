"""A transformer block as it decodes: functions of this rank's shards in place of modules."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from ringcomm.parallel.model.gpt import TransformerBlock
from ringcomm.parallel.tensor.attention import rotate
from ringcomm.parallel.tensor.layers import ParallelMLP
from ringcomm.torch.direct import Function, packed_linear

__all__ = ["DecoderBlock", "Tokens", "norm_of"]


class Tokens(NamedTuple):
    """What the blocks need to know of the tokens of a call.

    Attributes:
        where: their places in the sequences
        rotation: cosines and sines of their positions, (B, S, 1, D/2) or (1, S, 1, D/2); None: nothing is rotated
        mask: what is added to their scores; None: they attend causally
    """

    where: slice
    rotation: tuple[torch.Tensor, torch.Tensor] | None
    mask: torch.Tensor | None


class DecoderBlock:
    """A `TransformerBlock` in inference: (B, S, H) → (B, S, H), in place.

    Args:
        block: the block, whose linear layers are copied: those with the same input as one
        sum_in_place: sums a tensor over the ranks; called twice

    Attributes:
        width: D, the size of a head
        kv_heads: number of key and value heads of this rank
    """

    def __init__(self, block: TransformerBlock, sum_in_place: Callable[[torch.Tensor], Any]) -> None:
        attention, mlp = block.attention, block.mlp
        assert isinstance(mlp, ParallelMLP)
        self._sum, self._activation, self._gated = sum_in_place, mlp.activation, mlp.gate is not None
        self._norm_1, self._norm_2 = norm_of(block.norm_1), norm_of(block.norm_2)
        self.width = attention.width
        weight, bias = attention.own_keys()
        self.kv_heads = len(weight) // (2 * self.width)
        query = attention.query
        keys = _keys_first(weight, self.width), None if bias is None else _keys_first(bias, self.width)
        self._heads = _merged((query.weight, query.bias), keys)
        self._out, self._out_bias = packed_linear(attention.out.weight), attention.out.bias
        self._up = _merged(*((each.weight, each.bias) for each in (mlp.gate, mlp.up) if each))
        self._down, self._down_bias = packed_linear(mlp.down.weight), mlp.down.bias

    def __call__(self, x: torch.Tensor, keys_values: torch.Tensor, tokens: Tokens) -> None:
        """Add to the activations (B, S, H) of tokens, given the keys and values of their layer in a `KVCache`."""
        self._add(x, self._out(self._attend(self._norm_1(x), keys_values, tokens)), self._out_bias)
        self._add(x, self._down(self._activate(self._up(self._norm_2(x)))), self._down_bias)

    def _attend(self, x: torch.Tensor, keys_values: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        batch, length, _ = x.shape
        kv_heads, where = self.kv_heads, tokens.where
        heads = self._heads(x).view(batch, length, -1, self.width)  # those of queries, keys and values
        rotated = heads[:, :, :-kv_heads]
        if tokens.rotation:
            rotated = rotate(rotated, *tokens.rotation)
        query = rotated[:, :, :-kv_heads]
        keys, values = keys_values[:, :, :, : where.stop]
        keys[:, :, where] = rotated[:, :, -kv_heads:].transpose(1, 2)
        values[:, :, where] = heads[:, :, -kv_heads:].transpose(1, 2)
        if length == 1:  # the heads of a group are given as tokens of one head: all attend to the same keys
            query = query.view(batch, kv_heads, -1, self.width)
            return F.scaled_dot_product_attention(query, keys, values, tokens.mask).reshape(batch, 1, -1)
        query, mask, grouped = query.transpose(1, 2), tokens.mask, query.shape[2] > kv_heads
        out = F.scaled_dot_product_attention(query, keys, values, mask, is_causal=mask is None, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(2)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        if not self._gated:
            return self._activation(x)
        gate, up = x.chunk(2, -1)
        return self._activation(gate) * up

    def _add(self, x: torch.Tensor, partial_sum: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._sum(partial_sum)
        if bias is not None:
            partial_sum += bias
        x += partial_sum


def norm_of(module: nn.Module) -> Function:
    """Return the function of a LayerNorm or RMSNorm."""
    if isinstance(module, nn.RMSNorm):
        return partial(F.rms_norm, normalized_shape=module.normalized_shape, weight=module.weight, eps=module.eps)
    assert isinstance(module, nn.LayerNorm)
    shape, weight, bias = module.normalized_shape, module.weight, module.bias
    return partial(F.layer_norm, normalized_shape=shape, weight=weight, bias=bias, eps=module.eps)


def _merged(*layers: tuple[torch.Tensor, torch.Tensor | None]) -> Function:
    """Return linear layers, each a weight and a bias, as one, whose outputs are theirs one after another."""
    weights, biases = zip(*layers, strict=True)
    return packed_linear(torch.cat(weights), None if biases[0] is None else torch.cat(biases))


def _keys_first(parameter: torch.Tensor, width: int) -> torch.Tensor:
    """Return the rows for all keys, then those for all values, of a parameter in which those of a head are adjacent."""
    return parameter.view(-1, 2, width, *parameter.shape[1:]).transpose(0, 1).flatten(0, 2)
