"""A model of blocks with experts, and its batches."""

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel import SequenceParallelLayerNorm, gather_from
from ringcomm.parallel.collectives import local_slice
from ringcomm.parallel.experts.layer import Experts, set_loss_factor

B, S, H, E = 2, 8, 8, 4
INNER = 12
double = torch.float64


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=double, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """A residual block with experts, as in a transformer."""

    def __init__(self, grid, sequence_parallel=False, **options):
        super().__init__()
        self.norm = SequenceParallelLayerNorm(H, grid.tp) if sequence_parallel else nn.LayerNorm(H)
        self.moe = Experts(H, INNER, E, grid, sequence_parallel=sequence_parallel, **options)

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Stage(nn.Module):
    """Some of the blocks of a model. Its weights are those of the whole model, where all ranks have equal seeds."""

    def __init__(self, grid, blocks=range(2), recompute=False, seed=1, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.grid, self.recompute, self.sharded = grid, recompute, options.get("sequence_parallel")
        every = {str(number): Block(grid, **options) for number in range(max(blocks) + 1)}
        self.blocks = nn.ModuleDict({name: block for name, block in every.items() if int(name) in blocks})
        self.double()

    def forward(self, x):
        if self.sharded:
            x = local_slice(x, self.grid.tp, 1)
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return gather_from(x, self.grid.tp, 1) if self.sharded else x


def batches_of(number, step, rows=B):
    """Return the inputs and targets of some batches."""
    return [tuple(drawn(rows, S, H, seed=1000 * step + 2 * batch + i) for i in range(2)) for batch in range(number)]


def one_by_one(whole, batches):
    """Run the batches through the whole model, each alone, and return their mean loss."""
    set_loss_factor(whole, 1 / len(batches))
    losses = [F.mse_loss(whole(x), y) / len(batches) for x, y in batches]
    for loss in losses:
        loss.backward()
    return float(sum(losses))
