"""Which part of the full model a rank's parameters are.

A layer says it in two attributes: `split`, a dict, names the parameters that are cut over the tensor axis, with the
dimension along which they are; `copies`, a set, names those that another stage of the pipeline has too, and counts. All
others are whole,
and the same on every rank of the tensor axis. Names are those of the full model, so every parameter of a stage has a
name that no other stage has, but for copies. Where a vocabulary does not divide, the last rank's slice ends in padding
of zeros: `length` says how long the full dimension is without it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from ringcomm.errors import refuse
from ringcomm.parallel.functional import joined
from ringcomm.parallel.grid import Axis

__all__ = ["Modules", "Split", "copies", "counted", "listed", "load_full", "parameters", "plain", "splits", "to_full"]


class Split(NamedTuple):
    """How a parameter is cut: along which dimension, and how long that is in the full model."""

    dim: int
    length: int


Modules = nn.Module | Iterable[nn.Module]


def listed(chunks: Modules) -> list[nn.Module]:
    """Return the modules as a list; one alone is one, also if it is a container."""
    return [chunks] if isinstance(chunks, nn.Module) else list(chunks)


def parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters with their names, which are the same if the module is compiled."""
    for name, parameter in module.named_parameters():
        yield plain(name), parameter


def splits(module: nn.Module) -> dict[str, Split]:
    """Return the parameters of `module` that are cut over the tensor axis, by their full names."""
    found = ((at, getattr(layer, "split", None)) for at, layer in module.named_modules())
    known = ((at, cuts) for at, cuts in found if isinstance(cuts, dict))  # other layers call other things so
    return {plain(f"{at}.{name}"): split for at, cuts in known for name, split in cuts.items()}


def copies(module: nn.Module) -> set[str]:
    """Return the full names of the parameters of `module` that another stage counts."""
    found = ((at, getattr(layer, "copies", None)) for at, layer in module.named_modules())
    return {plain(f"{at}.{name}") for at, names in found if isinstance(names, set) for name in names}


def counted(chunks: Modules, tp: Axis) -> Iterator[nn.Parameter]:
    """Yield the parameters that this rank counts, so that the ranks of a model count each number of it once."""
    seen = set()
    for chunk in listed(chunks):
        cuts, elsewhere = splits(chunk), copies(chunk)
        for name, parameter in parameters(chunk):
            if parameter not in seen and name not in elsewhere and (name in cuts or tp.rank == 0):
                seen.add(parameter)
                yield parameter


def plain(name: str) -> str:
    """Return the name without what torch.compile puts around a module."""
    return name.replace("_orig_mod.", "").lstrip(".")


def cut(full: torch.Tensor, split: Split, tp: Axis) -> torch.Tensor:
    """Return this rank's slice of a full tensor, padded with zeros to the length of the others."""
    if full.shape[split.dim] != split.length:
        raise refuse(f"dimension {split.dim} of the full tensor", split.length, full.shape[split.dim])
    share = -(-split.length // tp.size)
    start = min(tp.rank * share, split.length)
    mine = full.narrow(split.dim, start, min(share, split.length - start))
    if mine.shape[split.dim] == share:
        return mine
    padded = full.new_zeros(*full.shape[: split.dim], share, *full.shape[split.dim + 1 :])
    padded.narrow(split.dim, 0, mine.shape[split.dim]).copy_(mine)
    return padded


def load_full(module: nn.Module, full: Mapping[str, torch.Tensor], tp: Axis) -> None:
    """Set the parameters of `module` to their parts of the full tensors of the same names.

    Raises:
        ArgumentError: a name is missing, or a full tensor has another shape than the parts make up.
    """
    found = splits(module)
    with torch.no_grad():
        for name, parameter in parameters(module):
            if name not in full:
                raise refuse("the full tensors", f"one named {name}", f"{len(full)} others")
            mine = cut(full[name], found[name], tp) if name in found else full[name]
            if mine.shape != parameter.shape:
                raise refuse(f"this rank's part of {name}", tuple(parameter.shape), tuple(mine.shape))
            parameter.copy_(mine)


def to_full(tensors: Mapping[str, torch.Tensor], found: Mapping[str, Split], tp: Axis) -> dict[str, torch.Tensor]:
    """Return the full tensors that the ranks of the axis hold parts of, on each of them.

    All pass the same names. Sends (t-1)/t of the bytes of every tensor that is cut.
    """
    return {
        name: joined(x, tp, found[name].dim).narrow(found[name].dim, 0, found[name].length) if name in found else x
        for name, x in tensors.items()
    }


def full_shape(x: torch.Tensor, split: Split | None) -> torch.Size:
    """Return the shape of the full tensor that `x` is a part of."""
    shape = list(x.shape)
    if split:
        shape[split.dim] = split.length
    return torch.Size(shape)
