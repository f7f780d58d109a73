"""A GPT in numbers: parameters and floating-point operations, in closed form.

The model is that of `ringcomm.parallel.gpt`: biases, two LayerNorms in each layer, an MLP of 4h, learned positions, an
output layer that shares the weights of the embedding. Symbols: l layers, h hidden, a heads, V vocabulary, s sequence
length, b sequences.
"""

from dataclasses import dataclass, fields

from ringcomm.errors import integer, refuse

__all__ = ["Transformer", "nearest_divisors"]


@dataclass(frozen=True)
class Transformer:
    """A GPT and the length of its sequences.

    Raises:
        ArgumentError: a number is not positive, or the heads do not divide the hidden size.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int

    def __post_init__(self) -> None:
        for each in fields(self):
            integer(each.name, getattr(self, each.name), 1)
        if self.hidden % self.heads:
            raise refuse("heads", nearest_divisors(self.hidden, self.heads, "hidden"), self.heads)

    @property
    def parameters(self) -> int:
        """Parameters: 12lh²(1 + 13/12h + (V + s)/12lh) (Narayanan et al., arXiv 2104.04473, equation 2), and 2h.

        The equation leaves out the last norm.
        """
        return self.layers * self.layer_parameters(1) + (self.vocab + self.seq + 2) * self.hidden

    def layer_parameters(self, tp: int) -> int:
        """Return the parameters of a layer on one of `tp` ranks: (12h² + 7h)/tp, and 6h that every rank has.

        Replicated are both norms and the biases of the row-parallel layers.
        """
        return (12 * self.hidden**2 + 7 * self.hidden) // tp + 6 * self.hidden

    def embedding_parameters(self, tp: int) -> int:
        """Return the parameters of the embedding on one of `tp` ranks, padded to equal shards."""
        return -(-self.vocab // tp) * self.hidden

    def layer_flops(self, sequences: int, scores: float = 1) -> float:
        """Return the FLOPs of a layer's forward: 24bsh² + 4bs²h. A backward has twice as many.

        `scores`: the share of the scores that is computed; half is enough for causal attention.
        """
        tokens = sequences * self.seq
        return 24 * tokens * self.hidden**2 + scores * 4 * tokens * self.seq * self.hidden

    def logit_flops(self, sequences: int) -> int:
        """Return the FLOPs of the output layer's forward: 2bshV."""
        return 2 * sequences * self.seq * self.hidden * self.vocab

    def step_flops(self, sequences: int, scores: float = 1) -> float:
        """Return the FLOPs of forward and backward: 72blsh²(1 + s/6h + V/12lh).

        Equation 3 of Narayanan et al. has 96 and V/16lh instead: with every layer's forward repeated in backward.
        """
        return 3 * (self.layers * self.layer_flops(sequences, scores) + self.logit_flops(sequences))


def nearest_divisors(number: int, wanted: int, name: str) -> str:
    """Return "a divisor of name = number (nearest: …)", for the message of a refusal."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    below = max((each for each in divisors if each <= wanted), default=1)
    above = min((each for each in divisors if each >= wanted), default=number)
    near = f"{below}" if below == above else f"{below} or {above}"
    return f"a divisor of {name} = {number} (nearest: {near})"
