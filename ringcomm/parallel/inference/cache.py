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
        padding: (B,), the number of padding tokens before each sequence; None: no sequence has any
        like: a tensor with the dtype and device

    Attributes:
        batch: number of sequences
        length: number of tokens that each sequence has so far, with padding
        capacity: number of tokens that it can have
        layers: the keys and values of each layer
    """

    def __init__(
        self, layers: int, shape: tuple[int, int, int, int], padding: torch.Tensor | None, like: torch.Tensor
    ) -> None:
        self.batch, self.length, self.capacity = shape[0], 0, shape[2]
        self.layers: list[torch.Tensor] = [*like.new_empty(layers, 2, *shape)]
        self._padding = padding

    def next(self, tokens: int) -> slice:
        """Return where the next tokens of each sequence are.

        Raises:
            ArgumentError: there is no memory for them.
        """
        end = self.length + tokens
        if end > self.capacity:
            raise refuse("tokens of a sequence", f"at most {self.capacity}, the capacity of the cache", end)
        return slice(self.length, end)

    def positions(self, where: slice) -> torch.Tensor:
        """Return the positions of tokens in their sequences: (B, S), or (1, S) if they are those of all sequences."""
        columns = torch.arange(where.start, where.stop, device=self.layers[0].device)
        return columns[None] if self._padding is None else (columns - self._padding[:, None]).clamp(min=0)

    def mask(self, where: slice) -> torch.Tensor | None:
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
