"""Tensor parallelism in 2, 2.5 and 3 dimensions: activations and weights are both sharded over d × q × q ranks.

In one dimension (`layers.py`) every rank has the full activations. Here it has a block of each matrix, so the memory
and the bytes of a rank shrink as ranks are added.

- **2-D** (d = 1): Xu et al., Optimus (arXiv 2104.05343), with the SUMMA of van de Geijn and Watts (1997).
- **2.5-D**: Wang et al., Tesseract (arXiv 2105.14500): d copies of the weights, each for a part of the batch.
- **3-D** (d = q): Agarwal et al. (1995) and Bian et al. (arXiv 2105.14450): no matrix is stored twice.

A linear layer gathers the blocks of input and weight that it multiplies, and in 3-D sums the products. Autograd keeps
the own blocks only, so backward gathers them again. The papers broadcast blocks one after another along trees; one
all-gather of all sends (q-1)/q where they count log q.

===========  ========================================================  =============================================
             Elements each rank sends in (B, S, I) → (B, S, O)         Backward
===========  ========================================================  =============================================
2-D, 2.5-D   (q-1)/q² · (B·S·I/d + I·O)                                twice that, and 2·(d-1)/d · I·O/q²
3-D          (q-1)/q³ · (B·S·I + I·O + B·S·O)                          (q-1)/q³ · (2·B·S·I + 2·I·O + B·S·O)
===========  ========================================================  =============================================

A transformer layer of hidden size h, four linear layers, sends (q-1)/q² · (7·B·S·h/d + 12·h²) forward, Optimus' formula
but for the factor; in 3-D (q-1)/q³ · (16·B·S·h + 12·h²). Gradients of biases are all-reduced among their copies.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from ringcomm.errors import integer, refuse
from ringcomm.parallel.collectives import (
    all_gathered,
    all_reduced,
    copy_to,
    gather_from,
    local_slice,
    reduce_scattered,
    scatter_to,
)
from ringcomm.parallel.grid import Axis
from ringcomm.torch.timeouts import timeout_of

__all__ = ["GridAttention", "GridLinear", "GridMLP", "TensorGrid"]

SAMPLES, FEATURES = 0, -1  # dimensions of an activation

Cut = tuple[Axis, int]  # the axis over which a tensor is sharded, and the dimension along which


class Distribution(NamedTuple):
    """How the matrices of a linear layer are distributed."""

    gather_input: Cut  # for the product
    gather_weight: Cut
    sum_output: Axis  # over which products are summed; each rank keeps a part of the samples
    cuts: tuple[Cut, ...]  # of the weight (out, in); the first is that of the bias
    weight_copies: Axis  # the ranks with the same block of the weight
    bias_copies: tuple[Axis, ...]  # along which ranks have the same part of the bias


class TensorGrid:
    """The ranks of an axis as d × q × q ranks. A context manager that closes its groups.

    An activation (B, S, H) is sharded into blocks (B/(d·q), S, H/q): the ranks of a `row` differ in their features,
    those of a `column` and of a `depth` in their samples. All ranks of the axis construct it at the same time.

    Args:
        axis: the ranks, d · q² of them, such as `grid.tp`
        depth: d. 1: 2-D; more: 2.5-D.
        cube: 3-D, with depth q, instead
        timeout: timeout of every operation on the three axes. None: that of `axis`

    Raises:
        ArgumentError: the size of the axis is not d · q², or q³ with `cube`.
    """

    def __init__(self, axis: Axis, depth: int = 1, *, cube: bool = False, timeout: timedelta | None = None) -> None:
        q = round(axis.size ** (1 / 3)) if cube else round((axis.size / integer("depth", depth, 1)) ** 0.5)
        depth = q if cube else depth
        if depth * q * q != axis.size:
            expected = "a cube, 1, 8, 27 …" if cube else f"depth {depth} · a square"
            raise refuse(f"size of {axis.name}", expected, axis.size)
        self.q, self.cube = q, cube
        ranks = torch.tensor(axis.ranks).reshape(depth, q, q)
        timeout = timeout or timeout_of(axis.group)
        self._alone = Axis("alone", 1, 0, (axis.ranks[axis.rank],), axis.group)
        self.depth, self.column, self.row = (
            self._line(name, ranks, dim, timeout) for dim, name in enumerate(("depth", "column", "row"))
        )

    def _line(self, name: str, ranks: torch.Tensor, dim: int, timeout: timedelta | None) -> Axis:
        """Return the axis of the ranks that differ from this one along a dimension only."""
        (rank,) = self._alone.ranks
        lines = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
        (line,) = (line for line in lines if rank in line)
        if len(line) == 1:
            return self._alone
        group = dist.new_group(line, timeout, use_local_synchronization=True, group_desc=name)
        return Axis(name, len(line), line.index(rank), tuple(line), group)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's block of an activation that all ranks have: (B, S, H) → (B/(d·q), S, H/q).

        Forward: no communication. Backward: all-gathers.

        Raises:
            ArgumentError: B is not a multiple of d · q, or H of q.
        """
        for axis, dim in ((self.column, SAMPLES), (self.depth, SAMPLES), (self.row, FEATURES)):
            x = scatter_to(x, axis, dim)
        return x

    def join(self, x: torch.Tensor, *, turned: bool = False) -> torch.Tensor:
        """Return the activation of all blocks, on every rank; `turned` if it is the output of a single layer in 3-D.

        Forward: all-gathers. Backward: no communication.
        """
        features, samples = (self.depth, self.row) if turned else (self.row, self.depth)
        for axis, dim in ((features, FEATURES), (samples, SAMPLES), (self.column, SAMPLES)):
            x = gather_from(x, axis, dim)
        return x

    def distribution(self, turned: bool) -> Distribution:
        """Return the distribution of a linear layer whose input is, in 3-D, as `split` returns it, or `turned`."""
        if not self.cube:
            cuts = (self.row, 0), (self.column, 1)
            copies = self.column, self.depth
            return Distribution((self.row, FEATURES), cuts[1], self._alone, cuts, self.depth, copies)
        # The features of the input are sharded over one of row and depth, those of the output over the other.
        inner, outer = (self.depth, self.row) if turned else (self.row, self.depth)
        parts = (outer, 0), (inner, 1), (self.column, 0)
        return Distribution((outer, SAMPLES), parts[2], inner, parts, self._alone, (self.column, inner))

    def close(self) -> None:
        """Destroy the groups. Every rank calls it; twice does no harm."""
        for axis in (self.row, self.column, self.depth):
            if axis.size > 1:
                with suppress(ValueError):  # torch's, if it is already destroyed
                    dist.destroy_process_group(axis.group)

    def __enter__(self) -> "TensorGrid":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GridLinear(nn.Module):
    """A linear layer with sharded activations and weights: blocks of (B, S, in_features) → of (B, S, out_features).

    It initializes its full weights as torch's layer does and keeps its block, so that ranks with equal random numbers
    start from the weights of one process. In 3-D the output is distributed over other axes than the input: the next
    layer is `turned`, and turns it back.

    Communication: see the module. Memory: during a product also the gathered blocks, B·S·I/(d·q) and I·O/q elements,
    in 3-D B·S·I/q² and I·O/q².

    Raises:
        ArgumentError: `in_features` is not a multiple of q, or `out_features` of q, in 3-D of q²; or in a call the
            input has another number of features.
    """

    def __init__(
        self, in_features: int, out_features: int, grid: TensorGrid, *, bias: bool = True, turned: bool = False
    ) -> None:
        super().__init__()
        for what, number, parts in (("in", in_features, grid.q), ("out", out_features, grid.q ** (1 + grid.cube))):
            if number % parts:
                raise refuse(f"{what}_features", f"a multiple of {parts}, for q = {grid.q}", number)
        self.in_features, self.out_features = in_features, out_features
        self.grid, self.distribution = grid, grid.distribution(turned)
        full = nn.Linear(in_features, out_features, bias)
        self.weight = nn.Parameter(self._block(full.weight))
        self.bias = nn.Parameter(self._block(full.bias)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] * self.grid.q != self.in_features:
            raise refuse("features of the input", f"{self.in_features} / {self.grid.q}", x.shape[-1])
        y: torch.Tensor = _Product.apply(x, self.weight, self.distribution)
        if self.bias is None:
            return y
        bias: torch.Tensor = self.bias
        for axis in self.distribution.bias_copies:
            bias = copy_to(bias, axis)
        return y + bias.to(y.dtype)

    def _block(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's block of the full weight or bias."""
        for axis, dim in self.distribution.cuts[: None if full.dim() == 2 else 1]:
            full = local_slice(full.detach(), axis, dim)
        return full

    def full(self, block: torch.Tensor) -> torch.Tensor:
        """Return the full weight or bias, or its gradient, on every rank, given this rank's. All ranks call it."""
        for axis, dim in reversed(self.distribution.cuts[: None if block.dim() == 2 else 1]):
            block = all_gathered(block, axis, dim)
        return block


class _Product(torch.autograd.Function):
    """x · weightᵀ of distributed matrices. Saves the blocks, and gathers them in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: Distribution) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.distribution = how
        y = F.linear(all_gathered(x, *how.gather_input), all_gathered(weight, *how.gather_weight))
        return _summed(y, how.sum_output, SAMPLES)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        how: Distribution = ctx.distribution
        x, weight = ctx.saved_tensors
        grad = all_gathered(grad, how.sum_output, SAMPLES)  # of 16 bits under autocast
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            panel = all_gathered(weight.to(grad.dtype), *how.gather_weight)
            x_grad = _summed(grad @ panel, *how.gather_input).to(x.dtype)
        if ctx.needs_input_grad[1]:
            panel = all_gathered(x.to(grad.dtype), *how.gather_input)
            weight_grad = _summed(grad.flatten(0, -2).t() @ panel.flatten(0, -2), *how.gather_weight)
            weight_grad = all_reduced(weight_grad, how.weight_copies).to(weight.dtype)
        return x_grad, weight_grad, None


def _summed(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's part of the sum over an axis."""
    return x if axis.size == 1 else reduce_scattered(x, axis, dim)


class GridMLP(nn.Module):
    """Two linear layers with an activation between them, on blocks of (B, S, H). Communication: that of the layers."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        grid: TensorGrid,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = GridLinear(hidden, inner, grid, bias=bias)
        self.down = GridLinear(inner, hidden, grid, bias=bias, turned=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.activation(self.up(x)))
        return y


class GridAttention(nn.Module):
    """Self-attention on blocks of (B, S, H): each rank has some of the samples and some of the heads.

    Communication: that of two linear layers, (B, S, H) → (B, S, 3H), in which query, key and value of a head are
    adjacent, and (B, S, H) → (B, S, H).

    Raises:
        ArgumentError: `heads` is not a multiple of q, or not a divisor of `hidden`.
    """

    def __init__(self, hidden: int, heads: int, grid: TensorGrid, *, causal: bool = True, bias: bool = True) -> None:
        super().__init__()
        if integer("heads", heads, 1) % grid.q or hidden % heads:
            raise refuse("heads", f"a multiple of q = {grid.q} and a divisor of the hidden size, {hidden}", heads)
        self.width, self.causal = hidden // heads, causal
        self.query_key_value = GridLinear(hidden, 3 * hidden, grid, bias=bias)
        self.out = GridLinear(hidden, hidden, grid, bias=bias, turned=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(x).unflatten(-1, (-1, 3, self.width))
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out
