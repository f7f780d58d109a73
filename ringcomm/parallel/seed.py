"""Random numbers: which ranks draw the same, and which draw their own.

torch's default generator is the stream of one stage of one replica: the same on the ranks of its tensor axis, different
across data and pipeline. Dropout of what all ranks of the tensor axis have draws from it as usual. Dropout of what is
cut (heads, a part of the sequence) runs inside `own`. That needs no second stream: the seed of the inside is drawn from
the outside, so whoever keeps and restores torch's state, as activation recomputation does, gets the same numbers again.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ringcomm.parallel.grid import Axis, Grid

__all__ = ["mixed", "own", "seed_ranks"]


def seed_ranks(grid: Grid, seed: int) -> None:
    """Seed torch alike on the ranks of `tp`, and differently across `dp` and `pp`."""
    torch.manual_seed(mixed(seed, grid.dp.rank, grid.pp.rank))


@contextmanager
def own(axis: Axis, device: torch.device) -> Iterator[None]:
    """Let each rank of the axis draw numbers of its own inside; outside, all go on drawing the same.

    Forward and backward: no communication. Every rank of the axis must enter with the same state of torch's generator.
    """
    if axis.size == 1:
        yield
        return
    seed = mixed(int(torch.randint(2**62, (), device="cpu")), axis.rank)
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)
        if gpus:
            with torch.cuda.device(device):  # this one only: the state of no other is restored
                torch.cuda.manual_seed(seed)
        yield


def mixed(*parts: int | str) -> int:
    """Return a seed of 63 bits that is another one for any other parts, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1
