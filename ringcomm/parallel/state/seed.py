"""Random numbers: equal on some ranks, different on others.

torch's default generator is equal on the ranks of a tensor axis and differs across data and pipeline. Dropout of
replicated activations draws from it as usual; dropout of sharded ones (heads, part of a sequence) runs inside
`rank_local_rng`. The seed inside is drawn from the generator outside, so saving and restoring torch's state, as
activation recomputation does, reproduces both.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ringcomm.parallel.collectives import all_gathered
from ringcomm.parallel.grid import Axis, Grid

__all__ = ["derive_seed", "get_rng_states", "rank_local_rng", "seed_ranks", "set_rng_states"]


def seed_ranks(grid: Grid, seed: int) -> None:
    """Seed torch equally on the ranks of `tp`, and differently across `dp`, `cp` and `pp`."""
    torch.manual_seed(derive_seed(seed, grid.dp_cp.rank, grid.pp.rank))


def get_rng_states(grid: Grid) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators of all replicas and stages, on every rank: for a checkpoint.

    Each is a tensor (dp · cp, pp, bytes). Ranks of `tp` have equal states. Communication: all-gathers over `pp` and
    over `dp_cp`; a state has 5,056 bytes on a CPU and 16 on a GPU.
    """
    states = {"cpu": torch.get_rng_state()}
    if grid.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    stages = {name: all_gathered(state.to(grid.device)[None], grid.pp, 0) for name, state in states.items()}
    return {name: all_gathered(each[None], grid.dp_cp, 0).cpu() for name, each in stages.items()}


def set_rng_states(states: Mapping[str, torch.Tensor], grid: Grid) -> None:
    """Continue with the random numbers after `get_rng_states`, if the grid has as many replicas and stages.

    On another grid, seed the ranks by a hash of the states, as `seed_ranks` does; GPUs after a run on CPUs, by a hash
    of the state of the CPU. No communication.
    """
    if states["cpu"].shape[:2] != (grid.dp_cp.size, grid.pp.size):
        seed_ranks(grid, _hashed(states["cpu"]))
        return
    # Clones, because torch crashes if it is given a view.
    mine = {name: state[grid.dp_cp.rank, grid.pp.rank].clone() for name, state in states.items()}
    torch.set_rng_state(mine["cpu"])
    if grid.device.type == "cuda" and "cuda" in mine:
        torch.cuda.set_rng_state(mine["cuda"])
    elif grid.device.type == "cuda":
        torch.cuda.manual_seed(_hashed(mine["cpu"]))


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


def _hashed(states: torch.Tensor) -> int:
    return derive_seed(states.numpy().tobytes().hex())
