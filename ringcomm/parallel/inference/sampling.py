"""The choice of the next token from logits that are sharded over the vocabulary."""

import sys
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.errors import RingcommError, integer, refuse
from ringcomm.parallel.collectives import all_gathered
from ringcomm.parallel.grid import Axis

__all__ = ["Sampling", "most_probable"]

NONE = -1  # in place of a token where the logits allow none: a rank that raised alone would leave the others waiting


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits
        top_k: draw from the k most probable tokens; None: from all
        top_p: draw from the most probable tokens, as few as have this probability together (Holtzman et al., arXiv
            1904.09751)
        seed: of the random numbers, those of the first rank; None: another one for each generation

    Raises:
        ArgumentError: a temperature that is not positive and finite, `top_k` below 1, `top_p` outside (0, 1], a
            negative seed, or a value of another type.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_positive(self.temperature, most=sys.float_info.max):
            expected = "a positive number (without Sampling tokens are greedy)"
            raise refuse("temperature", expected, repr(self.temperature))
        if self.top_k is not None:
            integer("top_k", self.top_k, 1)
        if not _is_positive(self.top_p, most=1):
            raise refuse("top_p", "a number above 0 and at most 1", repr(self.top_p))
        if self.seed is not None:
            integer("seed", self.seed, 0)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the random numbers of one generation."""
        random = torch.Generator(device)
        if self.seed is None:
            random.seed()
        else:
            random.manual_seed(self.seed)
        return random

    def draw(self, logits: torch.Tensor, tp: Axis, *, vocab_size: int, random: torch.Generator) -> torch.Tensor:
        """Return a token (B,) of each sequence, given the logits (B, V/t). The first rank draws for all.

        Communication: an all-gather of the logits, or of the highest `top_k` of each rank and their tokens; a broadcast
        of the drawn tokens.

        Raises:
            RingcommError: on all ranks, the logits of a sequence have NaN, or the highest is infinite.
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
            probabilities = self._probabilities(logits)
            undefined = probabilities.isnan().any(-1, keepdim=True)
            drawn = torch.multinomial(probabilities.masked_fill(undefined, 1), 1, generator=random)
            drawn = (drawn if tokens is None else tokens.gather(-1, drawn)).masked_fill(undefined, NONE)
        if tp.size > 1:
            dist.broadcast(drawn, tp.ranks[0], group=tp.group)
        return _checked(drawn[:, 0])

    def _probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the probabilities with which tokens are drawn, up to a factor for each sequence."""
        logits = logits.double()  # of which the highest becomes 0, so that no temperature makes it infinite
        probabilities = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_p == 1:
            return probabilities
        ordered, order = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the probability of all that are more probable
        return torch.zeros_like(ordered).scatter(-1, order, ordered.masked_fill(before >= self.top_p, 0))


def most_probable(logits: torch.Tensor, tp: Axis) -> torch.Tensor:
    """Return the most probable token (B,) of each sequence, of several the first, given the logits (B, V/t).

    Communication: an all-gather of two numbers for each sequence.

    Raises:
        RingcommError: on all ranks, the logits of a sequence have NaN.
    """
    value, index = logits.max(-1)
    pair = torch.stack([value.double(), (index + tp.rank * logits.shape[1]).double()])  # exact in 64 bits
    values, tokens = all_gathered(pair[None], tp, 0).unbind(1)  # (t, B)
    chosen = tokens.gather(0, values.argmax(0, keepdim=True))[0].long()
    return _checked(chosen.masked_fill(values.isnan().any(0), NONE))


def _is_positive(value: Any, most: float) -> bool:
    return isinstance(value, Real) and 0 < float(value) <= most


def _checked(tokens: torch.Tensor) -> torch.Tensor:
    """Return the chosen tokens (B,), which all ranks have; raise on all of them where one could not be chosen."""
    if failed := (tokens == NONE).nonzero().flatten().tolist():
        expected, got = "numbers of which the highest is finite", "NaN or infinity"
        message = f"logits of the sequences {failed}: expected {expected}, got {got}"
        raise RingcommError(message, argument="logits", expected=expected, got=got)
    return tokens
