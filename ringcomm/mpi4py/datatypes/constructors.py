"""The constructors of datatypes: each makes a layout of others, and records its arguments there."""

import copy
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.mpi4py.base.constants import (
    DISTRIBUTE_BLOCK,
    DISTRIBUTE_CYCLIC,
    DISTRIBUTE_DFLT_DARG,
    DISTRIBUTE_NONE,
    ORDER_C,
    ORDER_F,
)
from ringcomm.mpi4py.base.errors import ERR_ARG, ERR_COUNT, failure
from ringcomm.mpi4py.datatypes.layout import Layout, bounded, combined

__all__ = [
    *("contiguous", "darray", "duplicate", "hindexed", "hindexed_block", "hvector", "indexed", "indexed_block"),
    *("integers_and_addresses", "made", "resized", "structure", "subarray", "vector"),
]

Integers = Sequence[int]

# The arguments that MPI calls addresses; the others are integers.
ADDRESSES = {
    "HVECTOR": ("stride",),
    "HINDEXED": ("displacements",),
    "HINDEXED_BLOCK": ("displacements",),
    "STRUCT": ("displacements",),
    "RESIZED": ("lb", "extent"),
}


def made(layout: Layout, combiner: str, parameters: dict[str, Any], parts: Sequence[Layout] = ()) -> Layout:
    """Record in a new layout how it was made: by which constructor, with which arguments, of which layouts."""
    layout.combiner, layout.parameters, layout.parts = combiner, parameters, list(parts)
    return layout


def duplicate(layout: Layout) -> Layout:
    """Return a copy without name and attributes."""
    twin = copy.copy(layout)
    twin.name, twin.attributes = "", {}
    return made(twin, "DUP", {}, [layout])


def integers_and_addresses(layout: Layout) -> tuple[list[int], list[int]]:
    """Return the integers and the addresses with which a layout was made.

    As in MPI, the length of the lists is written once, before the first of them: of INDEXED_BLOCK before the length of
    a block, and of DARRAY after the size and the rank.
    """
    integers: list[int] = []
    addresses: list[int] = []
    for name, value in layout.parameters.items():
        numbers = addresses if name in ADDRESSES.get(layout.combiner, ()) else integers
        numbers += value if isinstance(value, list) else [value]
    lists = [value for value in layout.parameters.values() if isinstance(value, list)]
    if lists:
        integers.insert(2 if layout.combiner == "DARRAY" else 0, len(lists[0]))
    return integers, addresses


# --- The constructors of MPI: `Create_` and the name of the function --------------------------------------------------


def contiguous(layout: Layout, count: int) -> Layout:
    """Return the type of `count` elements."""
    parameters = {"count": _count("count", count)}
    return made(combined([(layout, [0], [count])]), "CONTIGUOUS", parameters, [layout])


def vector(layout: Layout, count: int, blocklength: int, stride: int) -> Layout:
    """Return the type of blocks that begin at multiples of `stride` elements."""
    return _strided(layout, "VECTOR", count, blocklength, stride)


def hvector(layout: Layout, count: int, blocklength: int, stride: int) -> Layout:
    """Return the type of blocks that begin at multiples of `stride` bytes."""
    return _strided(layout, "HVECTOR", count, blocklength, stride)


def _strided(layout: Layout, combiner: str, count: int, blocklength: int, stride: int) -> Layout:
    parameters = {
        "count": _count("count", count),
        "blocklength": _count("blocklength", blocklength, ERR_ARG),
        "stride": operator.index(stride),
    }
    offsets = np.arange(count) * stride * _unit(layout, combiner)
    return made(combined([(layout, offsets, [blocklength] * count)]), combiner, parameters, [layout])


def indexed(layout: Layout, blocklengths: Integers, displacements: Integers) -> Layout:
    """Return the type of blocks with displacements in elements."""
    return _indexed(layout, "INDEXED", blocklengths, displacements)


def hindexed(layout: Layout, blocklengths: Integers, displacements: Integers) -> Layout:
    """Return the type of blocks with displacements in bytes."""
    return _indexed(layout, "HINDEXED", blocklengths, displacements)


def _indexed(layout: Layout, combiner: str, blocklengths: Integers, displacements: Integers) -> Layout:
    parameters = {"blocklengths": _lengths(blocklengths), "displacements": _integers(displacements)}
    _check_equal(parameters)
    offsets = np.array(parameters["displacements"], np.int64) * _unit(layout, combiner)
    return made(combined([(layout, offsets, parameters["blocklengths"])]), combiner, parameters, [layout])


def indexed_block(layout: Layout, blocklength: int, displacements: Integers) -> Layout:
    """Return the type of blocks of one length with displacements in elements."""
    return _indexed_block(layout, "INDEXED_BLOCK", blocklength, displacements)


def hindexed_block(layout: Layout, blocklength: int, displacements: Integers) -> Layout:
    """Return the type of blocks of one length with displacements in bytes."""
    return _indexed_block(layout, "HINDEXED_BLOCK", blocklength, displacements)


def _indexed_block(layout: Layout, combiner: str, blocklength: int, displacements: Integers) -> Layout:
    at = _integers(displacements)
    parameters = {"blocklength": _count("blocklength", blocklength, ERR_ARG), "displacements": at}
    offsets = np.array(at, np.int64) * _unit(layout, combiner)
    return made(combined([(layout, offsets, [blocklength] * len(at))]), combiner, parameters, [layout])


def structure(blocklengths: Integers, displacements: Integers, parts: Sequence[Layout]) -> Layout:
    """Return blocks of several layouts with displacements in bytes, padded as C pads a structure."""
    parameters = {"blocklengths": _lengths(blocklengths), "displacements": _integers(displacements)}
    _check_equal({**parameters, "datatypes": parts})
    blocks = [(part, [at], [length]) for part, length, at in zip(parts, *parameters.values(), strict=True)]
    return made(combined(blocks, padded=True), "STRUCT", parameters, parts)


def subarray(layout: Layout, sizes: Integers, subsizes: Integers, starts: Integers, order: int = ORDER_C) -> Layout:
    """Return the type of a part of an array: `subsizes` elements from `starts`, along each dimension."""
    parameters = {"sizes": _integers(sizes), "subsizes": _integers(subsizes), "starts": _integers(starts)}
    _check_equal(parameters)
    axes = list(zip(*parameters.values(), strict=True))
    for axis, (size, part, start) in enumerate(axes):
        if part < 1 or start < 0 or start + part > size:
            text = f"dimension {axis}: expected 1 to {size} elements inside of {size}, got {part} from {start}"
            raise failure(ERR_ARG, text)
    indices = [start + np.arange(part) for _, part, start in axes]
    part_of_array = _part_of_array(layout, parameters["sizes"], indices, order)
    return made(part_of_array, "SUBARRAY", {**parameters, "order": order}, [layout])


def darray(
    layout: Layout,
    size: int,
    rank: int,
    gsizes: Integers,
    distribs: Integers,
    dargs: Integers,
    psizes: Integers,
    order: int = ORDER_C,
) -> Layout:
    """Return the type of the part that a rank has of an array distributed over a grid of ranks."""
    lists = {
        "gsizes": _integers(gsizes),
        "distribs": _integers(distribs),
        "dargs": _integers(dargs),
        "psizes": _integers(psizes),
    }
    _check_equal(lists)
    if min([*lists["gsizes"], *lists["psizes"]], default=1) < 1:
        raise failure(ERR_ARG, f"expected gsizes and psizes of at least 1, got {gsizes} and {psizes}")
    if np.prod(lists["psizes"], dtype=np.int64) != size or not 0 <= rank < size:
        raise failure(ERR_ARG, f"expected a grid of {size} ranks and a rank of it, got psizes {psizes} and rank {rank}")
    indices: list[NDArray[np.int64]] = []
    rest = rank
    for length, kind, argument, ranks in reversed(list(zip(*lists.values(), strict=True))):
        rest, mine = divmod(rest, ranks)
        block = _block(length, kind, argument, ranks)
        index = np.arange(length)
        indices.insert(0, index[index // block % ranks == mine])
    parameters = {"size": size, "rank": rank, **lists, "order": order}
    return made(_part_of_array(layout, lists["gsizes"], indices, order), "DARRAY", parameters, [layout])


def resized(layout: Layout, lb: int, extent: int) -> Layout:
    """Return the type with another lower bound and extent."""
    parameters = {"lb": operator.index(lb), "extent": operator.index(extent)}
    return made(bounded(layout, **parameters), "RESIZED", parameters, [layout])


def _part_of_array(layout: Layout, sizes: list[int], indices: list[NDArray[np.int64]], order: int) -> Layout:
    """Return the elements of an array that have these indices along each dimension. The bounds are the array's."""
    if order not in (ORDER_C, ORDER_F):
        raise failure(ERR_ARG, f"order: expected ORDER_C ({ORDER_C}) or ORDER_F ({ORDER_F}), got {order}")
    flat, whole = np.zeros(1, np.int64), 1
    for size, index in list(zip(sizes, indices, strict=True))[:: 1 if order == ORDER_F else -1]:
        flat, whole = ((index * whole)[:, None] + flat).reshape(-1), whole * size
    elements = combined([(layout, flat * layout.extent, np.ones_like(flat))])
    return bounded(elements, 0, whole * layout.extent)


def _block(length: int, kind: int, argument: int, ranks: int) -> int:
    """Return the length of the blocks in which one dimension of an array is dealt to the ranks."""
    if kind == DISTRIBUTE_NONE:
        if ranks != 1:
            raise failure(ERR_ARG, f"psizes: expected 1 for a dimension with DISTRIBUTE_NONE, got {ranks}")
        return length
    if kind not in (DISTRIBUTE_BLOCK, DISTRIBUTE_CYCLIC):
        raise failure(ERR_ARG, f"distribs: expected DISTRIBUTE_BLOCK, _CYCLIC or _NONE, got {kind}")
    least = -(-length // ranks) if kind == DISTRIBUTE_BLOCK else 1
    block = least if argument == DISTRIBUTE_DFLT_DARG else argument
    if block < least:
        raise failure(ERR_ARG, f"dargs: expected blocks of {least} elements or more, got {block}")
    return block


def _unit(layout: Layout, combiner: str) -> int:
    """Return the bytes of a step: those with H in their name count bytes, the others elements."""
    return 1 if combiner.startswith("H") else layout.extent


def _integers(values: Integers) -> list[int]:
    return [operator.index(value) for value in values]


def _count(name: str, value: int, code: int = ERR_COUNT) -> int:
    if operator.index(value) < 0:
        raise failure(code, f"{name}: expected at least 0, got {value}")
    return operator.index(value)


def _lengths(values: Integers) -> list[int]:
    return [_count(f"blocklengths[{number}]", value, ERR_ARG) for number, value in enumerate(values)]


def _check_equal(lists: dict[str, Any]) -> None:
    """Raise ValueError, as mpi4py does, if arguments differ in length."""
    lengths = [f"{len(each)} {name}" for name, each in lists.items()]
    if len({len(each) for each in lists.values()}) > 1:
        raise ValueError(f"expected lists of one length, got {', '.join(lengths)}")
