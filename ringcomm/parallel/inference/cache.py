"""The keys and values of the tokens that a model has seen."""

import torch

from ringcomm.errors import refuse

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of a batch of sequences, for this rank's heads of all layers. `Decoder.cache` makes one.

    Its memory is allocated at once: 2 · layers · B · kv_heads/t · capacity · D elements. The sequences of a batch end
    together, so shorter ones begin with padding, to which no token attends.

    Args:
        layers: number of layers
        shape: (B, kv_heads/t, capacity, D), that of the keys of a layer
        padding: (B,) integers, the number of padding tokens before each sequence, all of them in the first call; None:
            no sequence has any
        like: a tensor with the dtype and device

    Attributes:
        batch: number of sequences
        length: number of tokens that each sequence has so far, with padding
        capacity: number of tokens that it can have
        layers: the keys and values of each layer

    Raises:
        ArgumentError: `padding` has another shape or type, or a number that is negative or leaves no token.
    """

    def __init__(
        self, layers: int, shape: tuple[int, int, int, int], padding: torch.Tensor | None, like: torch.Tensor
    ) -> None:
        self.batch, self.length, self.capacity = shape[0], 0, shape[2]
        self.layers: list[torch.Tensor] = [*like.new_empty(layers, 2, *shape)]
        self._padding, self._most_padding = None, 0
        if padding is not None:
            self._most_padding = _most(padding, self.batch, self.capacity)
            self._padding = padding.to(like.device, torch.int64)

    def _append(self, tokens: int) -> slice:
        """Make room for the next tokens of each sequence; return where they are.

        Raises:
            ArgumentError: there is no memory for them, or they are the first and one sequence is padding only.
        """
        end = self.length + tokens
        if end > self.capacity:
            raise refuse("tokens of a sequence", f"at most {self.capacity}, the capacity of the cache", end)
        if end <= self._most_padding:
            raise refuse("padding", f"less than the {end} tokens of the first call", self._most_padding)
        where, self.length = slice(self.length, end), end
        return where

    def _positions(self, where: slice) -> torch.Tensor:
        """Return the positions of tokens in their sequences: (B, S), or (1, S) if they are those of all sequences."""
        columns = torch.arange(where.start, where.stop, device=self.layers[0].device)
        return columns[None] if self._padding is None else (columns - self._padding[:, None]).clamp(min=0)

    def _mask(self, where: slice) -> torch.Tensor | None:
        """Return what is added to the scores of tokens, (B, 1, S, end) or (S, end); None: nothing but causality.

        Padding attends to nothing, for which torch's attention returns zeros.
        """
        tokens = where.stop - where.start
        if self._padding is None and (where.start == 0 or tokens == 1):
            return None
        like = self.layers[0]
        columns = torch.arange(where.stop, device=like.device)
        queries = columns[where, None]
        attends = columns <= queries
        if self._padding is not None:
            attends = (attends & (columns >= self._padding[:, None, None]))[:, None]
        return like.new_zeros(attends.shape).masked_fill(~attends, -torch.inf)


def _most(padding: torch.Tensor, batch: int, capacity: int) -> int:
    """Return the most padding of a sequence, after a check of all numbers."""
    kind = getattr(padding, "dtype", type(padding).__name__)
    if kind not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise refuse("padding", "a tensor of integers", kind)
    if padding.shape != (batch,):
        raise refuse("shape of padding", (batch,), tuple(padding.shape))
    least, most = (int(each) for each in padding.aminmax())
    if least < 0 or most >= capacity:
        raise refuse("padding", f"numbers from 0 to {capacity - 1}", padding.tolist())
    return most
