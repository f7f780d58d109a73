"""A GPT in numbers: parameters and floating-point operations, in closed form.

The model is that of `ringcomm.parallel.gpt_stages`: biases, two LayerNorms in each layer, learned positions, an output
layer that shares the weights of the embedding. Symbols: l layers, h hidden, a heads, k heads of keys and values, f
inner size of an MLP, V vocabulary, s sequence length, b sequences. Formulas of papers have k = a and f = 4h. A gated
MLP has three matrices of h · f, others two. With experts each layer has E of them in place of its MLP, of which a token
passes `top_k`, and a router.
"""

from dataclasses import dataclass, fields

from ringcomm.errors import integer, refuse
from ringcomm.layout_rules import nearest_divisors

__all__ = ["MOST", "Transformer"]

MOST = 10**9  # layers, sequences and so on: far beyond any model, and divisors of larger numbers take seconds


@dataclass(frozen=True)
class Transformer:
    """A GPT and the length of its sequences.

    Attributes:
        kv_heads: heads of keys and values, fewer for grouped queries; None: `heads`
        ffn: inner size of an MLP; None: 4 · hidden
        gated: whether an MLP has a third matrix, whose product multiplies the activations
        experts: number of experts of each layer; 0: one MLP
        top_k: number of experts that a token passes

    Raises:
        ArgumentError: a number is not from 1 to MOST, the heads do not divide the hidden size, `kv_heads` the heads, or
            `top_k` is more than the experts.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    experts: int = 0
    top_k: int = 2

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.type is not bool and getattr(self, each.name) is not None:
                integer(each.name, getattr(self, each.name), int(each.name != "experts"), MOST)
        if self.hidden % self.heads:
            raise refuse("heads", nearest_divisors(self.hidden, self.heads, "hidden"), self.heads)
        if self.heads % (self.kv_heads or self.heads):
            raise refuse("kv_heads", nearest_divisors(self.heads, self.kv_heads or 1, "heads"), self.kv_heads)
        if self.experts and self.top_k > self.experts:
            raise refuse("top_k", f"at most experts = {self.experts}", self.top_k)

    @property
    def inner(self) -> int:
        """Inner size of an MLP."""
        return self.ffn or 4 * self.hidden

    def key_size(self, tp: int) -> int:
        """Return the size of a token's keys on all of `tp` ranks together, each of which has one head at least."""
        return max(self.kv_heads or self.heads, tp) * self.hidden // self.heads

    @property
    def matrices(self) -> int:
        """Matrices of an MLP."""
        return 2 + self.gated

    @property
    def parameters(self) -> int:
        """Parameters: 12lh²(1 + 13/12h + (V + s)/12lh) (Narayanan et al., arXiv 2104.04473, equation 2), and 2h.

        The equation leaves out the last norm.
        """
        return self.layers * self.layer_parameters(1) + (self.vocab + self.seq + 2) * self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes: those of `top_k` experts in each layer."""
        unused = max(0, self.experts - self.top_k)
        return self.parameters - self.layers * unused * self.mlp_parameters(1)

    def layer_parameters(self, tp: int, ep: int = 1) -> int:
        """Return the parameters of a layer on one of `tp` ranks: (12h² + 7h)/tp, and 6h that every rank has.

        In general (2h² + 2h²k/a + 2hf + h + 2hk/a + f)/tp. Replicated are both norms, the biases of the row-parallel
        layers, and the router.
        """
        columns = self.hidden + 2 * self.key_size(tp)
        attention = (self.hidden * (columns + self.hidden) + columns) // tp + 5 * self.hidden
        mlps = self.experts * self.hidden + self.expert_parameters(tp, ep) if self.experts else self.mlp_parameters(tp)
        return attention + mlps

    def expert_parameters(self, tp: int, ep: int) -> int:
        """Return the parameters of a layer's experts on one of `tp` · `ep` ranks."""
        return self.experts // ep * self.mlp_parameters(tp)

    def mlp_parameters(self, tp: int) -> int:
        """Return the parameters of an MLP on one of `tp` ranks: (2hf + f)/tp + h, or (3hf + 2f)/tp + h if gated."""
        columns = (self.matrices - 1) * self.inner
        return (self.hidden * (columns + self.inner) + columns) // tp + self.hidden

    def embedding_parameters(self, tp: int) -> int:
        """Return the parameters of the embedding on one of `tp` ranks, padded to equal shards."""
        return -(-self.vocab // tp) * self.hidden

    def layer_flops(self, sequences: int, scores: float = 1) -> float:
        """Return the FLOPs of a layer's forward: 24bsh² + 4bs²h, or 4bsh(h + hk/a + f) + 4bs²h.

        Each expert that a token passes has those of an MLP. A backward has twice as many.

        `scores`: the share of the scores that is computed; half is enough for causal attention.
        """
        tokens = sequences * self.seq
        mlp = self.matrices * self.inner * (self.top_k if self.experts else 1) + self.experts
        products = 2 * tokens * self.hidden * (2 * self.hidden + 2 * self.key_size(1) + mlp)
        return products + scores * 4 * tokens * self.seq * self.hidden

    def logit_flops(self, sequences: int) -> int:
        """Return the FLOPs of the output layer's forward: 2bshV."""
        return 2 * sequences * self.seq * self.hidden * self.vocab

    def step_flops(self, sequences: int, scores: float = 1) -> float:
        """Return the FLOPs of forward and backward: 72blsh²(1 + s/6h + V/12lh).

        Equation 3 of Narayanan et al. has 96 and V/16lh instead: with every layer's forward repeated in backward.
        """
        return 3 * (self.layers * self.layer_flops(sequences, scores) + self.logit_flops(sequences))
