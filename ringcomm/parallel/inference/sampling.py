"""The choice of the next token from logits that are sharded over the vocabulary."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ringcomm.errors import integer, refuse
from ringcomm.parallel.collectives import all_gathered
from ringcomm.parallel.grid import Axis

__all__ = ["Sampling", "most_probable"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits
        top_k: draw from the k most probable tokens; None: from all
        top_p: draw from the most probable tokens, as few as have this probability together (Holtzman et al., arXiv
            1904.09751)
        seed: of the random numbers

    Raises:
        ArgumentError: a temperature that is not positive and finite, `top_k` below 1, or `top_p` outside (0, 1].
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise refuse("temperature", "a positive number (without Sampling tokens are greedy)", self.temperature)
        if self.top_k is not None:
            integer("top_k", self.top_k, 1)
        if not 0 < self.top_p <= 1:
            raise refuse("top_p", "a number above 0 and at most 1", self.top_p)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the random numbers of one generation."""
        return torch.Generator(device).manual_seed(self.seed)

    def draw(self, logits: torch.Tensor, tp: Axis, *, vocab_size: int, random: torch.Generator) -> torch.Tensor:
        """Return a token (B,) of each sequence, given the logits (B, V/t). The first rank draws for all.

        Communication: an all-gather of the logits, or of the highest `top_k` of each rank and their tokens; a broadcast
        of the drawn tokens.
        """
        if self.top_k is None:
            tokens, logits = None, all_gathered(logits, tp, -1)[:, :vocab_size]
        else:
            values, indices = logits.topk(min(self.top_k, logits.shape[1]))
            indices += tp.rank * logits.shape[1]
            values, tokens = (all_gathered(each, tp, -1) for each in (values, indices))
            logits, order = values.topk(min(self.top_k, vocab_size))
            tokens = tokens.gather(-1, order)
        drawn = torch.empty(len(logits), 1, dtype=torch.int64, device=logits.device)
        if tp.rank == 0:
            drawn = torch.multinomial(self._probabilities(logits), 1, generator=random)
            drawn = drawn if tokens is None else tokens.gather(-1, drawn)
        if tp.size > 1:
            dist.broadcast(drawn, tp.ranks[0], group=tp.group)
        return drawn[:, 0]

    def _probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the probabilities with which tokens are drawn, up to a factor for each sequence."""
        probabilities = (logits.float() / self.temperature).softmax(-1)
        if self.top_p == 1:
            return probabilities
        ordered, order = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the probability of all that are more probable
        return torch.zeros_like(ordered).scatter(-1, order, ordered.masked_fill(before >= self.top_p, 0))


def most_probable(logits: torch.Tensor, tp: Axis) -> torch.Tensor:
    """Return the most probable token (B,) of each sequence, of several the first, given the logits (B, V/t).

    Communication: an all-gather of two numbers for each sequence.
    """
    value, index = logits.max(-1)
    pair = torch.stack([value.double(), (index + tp.rank * logits.shape[1]).double()])  # exact in 64 bits
    values, tokens = all_gathered(pair[None], tp, 0).unbind(1)  # (t, B)
    return tokens.gather(0, values.argmax(0, keepdim=True))[0].long()
