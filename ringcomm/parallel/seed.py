"""Random numbers: equal on some ranks, different on others.

torch's default generator is equal on the ranks of a tensor axis and differs across data and pipeline. Dropout of
replicated activations draws from it as usual; dropout of sharded ones (heads, part of a sequence) runs inside
`rank_local_rng`. The seed inside is drawn from the generator outside, so saving and restoring torch's state, as
activation recomputation does, reproduces both.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ringcomm.parallel.grid import Axis, Grid

__all__ = ["derive_seed", "rank_local_rng", "seed_ranks"]


def seed_ranks(grid: Grid, seed: int) -> None:
    """Seed torch equally on the ranks of `tp`, and differently across `dp`, `cp` and `pp`."""
    torch.manual_seed(derive_seed(seed, grid.dp_cp.rank, grid.pp.rank))


@contextmanager
def rank_local_rng(axis: Axis, device: torch.device) -> Iterator[None]:
    """Use different random numbers on each rank of the axis inside the block, without affecting those after it.

    No communication. Every rank of the axis must enter with the same state of torch's generator.
    """
    if axis.size == 1:
        yield
        return
    seed = derive_seed(int(torch.randint(2**62, (), device="cpu")), axis.rank)
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)
        if gpus:
            with torch.cuda.device(device):  # of this GPU only: fork_rng restores no other
                torch.cuda.manual_seed(seed)
        yield


def derive_seed(*parts: int | str) -> int:
    """Return a seed of 63 bits: a hash of the parts, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1
