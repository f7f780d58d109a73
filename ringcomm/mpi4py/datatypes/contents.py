"""What MPI tells about how a datatype was made."""

from __future__ import annotations

from ringcomm.mpi4py.datatypes.layout import Layout

__all__ = ["integers_and_addresses"]

# The arguments that are addresses; the others are integers.
ADDRESSES = {
    "HVECTOR": ("stride",),
    "HINDEXED": ("displacements",),
    "HINDEXED_BLOCK": ("displacements",),
    "STRUCT": ("displacements",),
    "RESIZED": ("lb", "extent"),
}


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
