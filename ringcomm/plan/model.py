"""A GPT in numbers: parameters and floating-point operations, in closed form.

The model is that of `ringcomm.parallel.gpt`: biases, two LayerNorms in each layer, learned positions, an output layer
that shares the weights of the embedding. Symbols: l layers, h hidden, a heads, k heads of keys and values, f inner size
of an MLP, V vocabulary, s sequence length, b sequences. Formulas of papers have k = a and f = 4h.
"""

from dataclasses import dataclass, fields

from ringcomm.errors import integer, refuse

__all__ = ["Transformer", "nearest_divisors"]


@dataclass(frozen=True)
class Transformer:
    """A GPT and the length of its sequences.

    Attributes:
        kv_heads: heads of keys and values, fewer for grouped queries; None: `heads`
        ffn: inner size of an MLP; None: 4 · hidden

    Raises:
        ArgumentError: a number is not positive, the heads do not divide the hidden size, or `kv_heads` the heads.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int | None = None
    ffn: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is not None:
                integer(each.name, getattr(self, each.name), 1)
        if self.hidden % self.heads:
            raise refuse("heads", nearest_divisors(self.hidden, self.heads, "hidden"), self.heads)
        if self.heads % (self.kv_heads or self.heads):
            raise refuse("kv_heads", nearest_divisors(self.heads, self.kv_heads or 1, "heads"), self.kv_heads)

    @property
    def inner(self) -> int:
        """Inner size of an MLP."""
        return self.ffn or 4 * self.hidden

    def key_size(self, tp: int) -> int:
        """Return the size of a token's keys on all of `tp` ranks together, each of which has one head at least."""
        return max(self.kv_heads or self.heads, tp) * self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Parameters: 12lh²(1 + 13/12h + (V + s)/12lh) (Narayanan et al., arXiv 2104.04473, equation 2), and 2h.

        The equation leaves out the last norm.
        """
        return self.layers * self.layer_parameters(1) + (self.vocab + self.seq + 2) * self.hidden

    def layer_parameters(self, tp: int) -> int:
        """Return the parameters of a layer on one of `tp` ranks: (12h² + 7h)/tp, and 6h that every rank has.

        In general (2h² + 2h²k/a + 2hf + h + 2hk/a + f)/tp. Replicated are both norms and the biases of the row-parallel
        layers.
        """
        columns = self.hidden + 2 * self.key_size(tp) + self.inner
        rows = self.hidden + self.inner
        return (self.hidden * (columns + rows) + columns) // tp + 6 * self.hidden

    def embedding_parameters(self, tp: int) -> int:
        """Return the parameters of the embedding on one of `tp` ranks, padded to equal shards."""
        return -(-self.vocab // tp) * self.hidden

    def layer_flops(self, sequences: int, scores: float = 1) -> float:
        """Return the FLOPs of a layer's forward: 24bsh² + 4bs²h, or 4bsh(h + hk/a + f) + 4bs²h.

        A backward has twice as many.

        `scores`: the share of the scores that is computed; half is enough for causal attention.
        """
        tokens = sequences * self.seq
        products = 4 * tokens * self.hidden * (self.hidden + self.key_size(1) + self.inner)
        return products + scores * 4 * tokens * self.seq * self.hidden

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
