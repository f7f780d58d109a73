"""A GPT as it decodes: the weights of its stages as inference reads them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ringcomm.errors import integer, refuse
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.inference.block import DecoderBlock, Tokens, norm_of
from ringcomm.parallel.inference.cache import KVCache
from ringcomm.parallel.model.gpt import GPTStage
from ringcomm.parallel.tensor.attention import rotations
from ringcomm.torch.direct import in_place_sum, packed_linear

__all__ = ["Decoder"]


class Decoder:
    """A GPT or Llama for inference, sharded over `tp`: token ids and a cache → logits of the next token.

    What training needs and decoding does not (gradients, modules, the layers of torch.distributed) would take longer
    than the arithmetic of a token, so this is made of functions. It copies the linear layers and refers to the other
    weights: make a new Decoder after the weights have changed. Drop the stages to free their linear layers. Dropout,
    recomputation and sequence parallelism have no effect. ::

        decoder = Decoder(stages, grid)
        cache = decoder.cache(batch=1, capacity=100)
        logits = decoder(prompt, cache)  # prefill
        logits = decoder(next_token, cache)  # a step

    Communication: an all-reduce of B·S·H elements for the embedding, and two for each block.

    Args:
        stages: the model: the stages of `gpt_stages`, on a grid without a pipeline
        grid: the grid of the stages; replicas (`dp`) decode independently

    Attributes:
        config: the configuration of the model
        tp: the ranks with the shards
        device: the device of the model

    Raises:
        ArgumentError: the grid has `pp` or `cp`; the model has experts, or parameters of `fully_shard`.
    """

    @torch.no_grad()
    def __init__(self, stages: Sequence[GPTStage], grid: Grid) -> None:
        first, last = stages[0], stages[-1]
        self.config, self.tp, self.device = first.config, grid.tp, grid.device
        for axis in (grid.pp, grid.cp):
            if axis.size > 1:
                raise refuse(f"{axis.name} of a grid for inference", 1, axis.size)
        if self.config.experts:
            raise refuse("experts of a model for inference", 0, self.config.experts)
        if any(isinstance(parameter, DTensor) for stage in stages for parameter in stage.parameters()):
            raise refuse("parameters of a model for inference", "tensors", "DTensors of fully_shard")
        self._sum = in_place_sum(grid.tp.group, grid.device)
        self._embedding, self._positions = first.embedding, first.positions
        blocks: Any = [block for stage in stages for block in stage.blocks.values()]
        self._blocks = [DecoderBlock(block, self._sum) for block in blocks]
        embedded = self._embedding.weight
        self._kind = (len(blocks), self._blocks[0].kv_heads, self._blocks[0].width, embedded.dtype, embedded.device)
        self._norm = norm_of(last.norm)
        weight = (last.embedding if self.config.tied else last.head).weight
        self._head = packed_linear(weight)
        self._tokens = self.config.vocab_size - grid.tp.rank * len(weight)  # the rows from there on are padding

    def cache(self, batch: int, capacity: int, padding: torch.Tensor | None = None) -> KVCache:
        """Return an empty cache for sequences of up to `capacity` tokens; see `KVCache`.

        Raises:
            ArgumentError: a number is less than 1, `capacity` more than the `context` of the model, or `padding` is
                not (B,) integers from 0 to `capacity` - 1.
        """
        capacity = integer("capacity of a cache", capacity, 1, self.config.context)
        shape = (integer("batch", batch, 1), self._blocks[0].kv_heads, capacity, self._blocks[0].width)
        return KVCache(len(self._blocks), shape, padding, self._embedding.weight)

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Append the next tokens (B, S) of each sequence to the cache; return the logits (B, V/t) after the last.

        A row that pads the vocabulary has the logit -∞.

        Raises:
            ArgumentError: the ids have another shape or type, the cache has no memory for them or is that of another
                model, one id is not in the vocabulary (see `VocabParallelEmbedding`), or a sequence would be padding
                only.
        """
        found = len(cache.layers), *cache.layers[0].shape[2::2], cache.layers[0].dtype, cache.layers[0].device
        if found != self._kind:
            raise refuse("layers, heads, their size, dtype and device of the cache", self._kind, found)
        if ids.dtype not in (torch.int64, torch.int32):
            raise refuse("dtype of ids", "torch.int64 or torch.int32", ids.dtype)
        if ids.dim() != 2 or len(ids) != cache.batch or not ids.shape[1]:
            raise refuse("shape of ids", f"({cache.batch}, at least 1)", tuple(ids.shape))
        x = self._embedding.partial(ids)
        where = cache._append(ids.shape[1])
        positions, rotation = cache._positions(where), None
        self._sum(x)
        if self._positions:
            x += self._positions(positions)
        if base := self.config.rotary_base:
            rotation = rotations(positions[..., None], self._blocks[0].width, base, x.dtype)
        tokens = Tokens(where, rotation, cache._mask(where))
        for block, keys_values in zip(self._blocks, cache.layers, strict=True):
            block(x, keys_values, tokens)
        logits = self._head(self._norm(x[:, -1]))
        logits[:, self._tokens :] = -torch.inf
        return logits
