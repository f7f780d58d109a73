"""The class of datatypes: handles of layouts. predefined.py has the constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from ringcomm.mpi4py.base import constants
from ringcomm.mpi4py.base.attributes import Attributes
from ringcomm.mpi4py.base.constants import ORDER_C, TYPECLASS_COMPLEX, TYPECLASS_INTEGER, TYPECLASS_REAL
from ringcomm.mpi4py.base.errors import ERR_ARG, ERR_TYPE, failure
from ringcomm.mpi4py.base.handles import Handle
from ringcomm.mpi4py.base.integers import integral
from ringcomm.mpi4py.datatypes import constructors
from ringcomm.mpi4py.datatypes.contents import integers_and_addresses
from ringcomm.mpi4py.datatypes.layout import Layout
from ringcomm.mpi4py.datatypes.packing import Packing

__all__ = ["BY_SIZE", "CODES", "NAMED", "PAIRS", "Datatype"]

# Filled by predefined.py: the constants by the id of their layout, by code, and for Match_size and Get_value_index.
NAMED: dict[int, Datatype] = {}
CODES: dict[str, Datatype] = {}
BY_SIZE: dict[tuple[int, int], Datatype] = {}
PAIRS: dict[tuple[int, int], Datatype] = {}

F90 = ("F90_INTEGER", "F90_REAL", "F90_COMPLEX")


class Datatype(Packing, Attributes, Handle):
    """What one element of an array is, and where its data lies."""

    @property
    def _attributes(self) -> dict[int, Any]:  # type: ignore[override]  # of all handles of the datatype
        return self._layout.attributes

    def __reduce__(self) -> Any:
        if not self or self.is_named:
            return super().__reduce__()
        return _recreate, (type(self), *self.decode())

    def free(self) -> None:
        """Free the datatype, unless the handle is null or a constant. Of a predefined one, only the handle."""
        if self and self.is_predefined:
            if self is not NAMED.get(id(self._object)):
                self._nullify()
        elif self:
            self.Free()

    def Free(self) -> None:
        """Free the datatype. Types made from it stay valid."""
        if self.is_predefined:
            got = f"the predefined {self.name}" if self else "DATATYPE_NULL"
            raise failure(ERR_TYPE, f"expected a datatype that the program has made, got {got}")
        self._delete_attributes()
        self._nullify()

    def Commit(self) -> Self:
        """Return this datatype: all can be used at once."""
        self._layout  # noqa: B018 (raises if the handle is null)
        return self

    # --- Properties ---------------------------------------------------------------------------------------------------

    def Get_size(self) -> int:
        """Return the bytes of data."""
        return self._layout.size

    def Get_extent(self) -> tuple[int, int]:
        """Return the lower bound and the extent."""
        return self._layout.lb, self._layout.extent

    def Get_true_extent(self) -> tuple[int, int]:
        """Return the lower bound and the extent of the data."""
        return self._layout.true_lb, self._layout.true_extent

    size = property(Get_size)

    @property
    def lb(self) -> int:
        """Lower bound."""
        return self.Get_extent()[0]

    @property
    def extent(self) -> int:
        """Extent."""
        return self.Get_extent()[1]

    @property
    def ub(self) -> int:
        """Upper bound."""
        return sum(self.Get_extent())

    @property
    def true_lb(self) -> int:
        """Lower bound of the data."""
        return self.Get_true_extent()[0]

    @property
    def true_extent(self) -> int:
        """Extent of the data."""
        return self.Get_true_extent()[1]

    @property
    def true_ub(self) -> int:
        """Upper bound of the data."""
        return sum(self.Get_true_extent())

    @property
    def is_named(self) -> bool:
        """Whether it is one of the constants."""
        return self._object is None or self._object.combiner == "NAMED"

    @property
    def is_predefined(self) -> bool:
        """Whether it is one of the constants, or of the Fortran types with a precision."""
        return self._object is None or self._object.combiner in ("NAMED", *F90)

    def Get_name(self) -> str:
        """Return the name."""
        return "MPI_DATATYPE_NULL" if self._object is None else self._object.name

    def Set_name(self, name: str) -> None:
        """Set the name."""
        self._layout.name = name

    name = property(Get_name, Set_name)

    @property
    def combiner(self) -> int:
        """The number of the constructor."""
        return int(getattr(constants, f"COMBINER_{self._layout.combiner}"))

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        """Return how many integers, addresses, counts and datatypes Get_contents returns, and the combiner."""
        integers, addresses = integers_and_addresses(self._layout)
        return len(integers), len(addresses), 0, len(self._layout.parts), self.combiner

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        """Return the arguments with which the datatype was made: integers, addresses, counts and datatypes.

        As on an MPI without large counts, all numbers are integers or addresses.
        """
        if self._layout.combiner == "NAMED":
            raise failure(ERR_TYPE, f"expected a datatype made of others, got the predefined {self.name}")
        integers, addresses = integers_and_addresses(self._layout)
        return integers, addresses, [], [_handle(part) for part in self._layout.parts]

    envelope, contents = property(Get_envelope), property(Get_contents)

    def decode(self) -> tuple[Datatype, str, dict[str, Any]]:
        """Return the datatype, the name of the combiner and the arguments from which this one was made."""
        layout = self._layout
        if layout.combiner == "NAMED":
            return self, "NAMED", {}
        parts = [_handle(part) for part in layout.parts]
        arguments = dict(layout.parameters) | ({"datatypes": parts} if layout.combiner == "STRUCT" else {})
        return parts[0] if len(parts) == 1 else _handle(None), layout.combiner, arguments

    # --- Constructors -------------------------------------------------------------------------------------------------

    def Dup(self) -> Self:
        """Return a copy with the attributes that their keys say."""
        dup = self._of(constructors.duplicate(self._layout))
        self._copy_attributes(dup)
        return dup

    Create_dup = Dup

    @integral
    def Create_contiguous(self, count: int) -> Self:
        """Return the type of `count` elements."""
        return self._of(constructors.contiguous(self._layout, count))

    @integral
    def Create_vector(self, count: int, blocklength: int, stride: int) -> Self:
        """Return the type of blocks that begin at multiples of `stride` elements."""
        return self._of(constructors.strided(self._layout, "VECTOR", count, blocklength, stride))

    @integral
    def Create_hvector(self, count: int, blocklength: int, stride: int) -> Self:
        """Return the type of blocks that begin at multiples of `stride` bytes."""
        return self._of(constructors.strided(self._layout, "HVECTOR", count, blocklength, stride))

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        """Return the type of blocks with displacements in elements."""
        return self._of(constructors.indexed(self._layout, "INDEXED", blocklengths, displacements))

    def Create_hindexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        """Return the type of blocks with displacements in bytes."""
        return self._of(constructors.indexed(self._layout, "HINDEXED", blocklengths, displacements))

    @integral
    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
        """Return the type of blocks of one length with displacements in elements."""
        return self._of(constructors.block_indexed(self._layout, "INDEXED_BLOCK", blocklength, displacements))

    @integral
    def Create_hindexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
        """Return the type of blocks of one length with displacements in bytes."""
        return self._of(constructors.block_indexed(self._layout, "HINDEXED_BLOCK", blocklength, displacements))

    @classmethod
    def Create_struct(
        cls, blocklengths: Sequence[int], displacements: Sequence[int], datatypes: Sequence[Datatype]
    ) -> Self:
        """Return the type of blocks of several types with displacements in bytes."""
        return cls._of(constructors.structure(blocklengths, displacements, [each._layout for each in datatypes]))

    @integral
    def Create_subarray(
        self, sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], order: int = ORDER_C
    ) -> Self:
        """Return the type of a part of an array: `subsizes` elements from `starts`, along each dimension."""
        return self._of(constructors.subarray(self._layout, sizes, subsizes, starts, order))

    @integral
    def Create_darray(
        self,
        size: int,
        rank: int,
        gsizes: Sequence[int],
        distribs: Sequence[int],
        dargs: Sequence[int],
        psizes: Sequence[int],
        order: int = ORDER_C,
    ) -> Self:
        """Return the type of the part that a rank has of an array distributed over a grid of ranks."""
        layout = constructors.distributed(self._layout, size, rank, gsizes, distribs, dargs, psizes, order)
        return self._of(layout)

    @integral
    def Create_resized(self, lb: int, extent: int) -> Self:
        """Return the type with another lower bound and extent."""
        return self._of(constructors.with_bounds(self._layout, lb, extent))

    Resized = Create_resized

    @classmethod
    @integral
    def Create_f90_integer(cls, r: int) -> Self:
        """Return the integer type that has numbers of `r` decimal digits."""
        for digits, size in ((2, 1), (4, 2), (9, 4), (18, 8)):
            if r <= digits:
                return cls._fortran("F90_INTEGER", TYPECLASS_INTEGER, size, {"r": r})
        raise failure(ERR_ARG, f"r: expected at most 18 digits, got {r}")

    @classmethod
    @integral
    def Create_f90_real(cls, p: int, r: int) -> Self:
        """Return the real type with `p` decimal digits and exponents up to `r`; either may be UNDEFINED."""
        return cls._fortran("F90_REAL", TYPECLASS_REAL, _real_size(p, r), {"p": p, "r": r})

    @classmethod
    @integral
    def Create_f90_complex(cls, p: int, r: int) -> Self:
        """Return the complex type with `p` decimal digits and exponents up to `r`; either may be UNDEFINED."""
        return cls._fortran("F90_COMPLEX", TYPECLASS_COMPLEX, 2 * _real_size(p, r), {"p": p, "r": r})

    @classmethod
    def _fortran(cls, combiner: str, typeclass: int, size: int, parameters: dict[str, int]) -> Self:
        layout = constructors.duplicate(BY_SIZE[typeclass, size]._layout)
        return cls._of(constructors.made(layout, combiner, parameters))

    @classmethod
    @integral
    def Match_size(cls, typeclass: int, size: int) -> Self:
        """Return the Fortran type of a class that has a size in bytes."""
        datatype = BY_SIZE.get((typeclass, size))
        if datatype is None:
            sizes = [known for each, known in BY_SIZE if each == typeclass]
            expected = f"a size of {sizes} bytes" if sizes else "a TYPECLASS_ constant"
            raise failure(ERR_ARG, f"expected {expected}, got class {typeclass} and {size} bytes")
        return cls(datatype)

    @classmethod
    def Get_value_index(cls, value: Datatype, index: Datatype) -> Self:
        """Return the predefined type of pairs, for MAXLOC and MINLOC; DATATYPE_NULL if there is none."""
        return cls(PAIRS.get((id(value._layout), id(index._layout))))

    # --- Codes --------------------------------------------------------------------------------------------------------

    def tocode(self) -> str:
        """Return the code that NumPy or the buffer protocol has for a predefined type."""
        if not self or not self._layout.code:
            raise ValueError(f"expected a predefined datatype of one number, got {self.name or 'one without name'}")
        return self._layout.code

    @classmethod
    def fromcode(cls, code: str) -> Datatype:
        """Return the predefined type of a code."""
        if code not in CODES:
            raise ValueError(f"expected a code of a datatype, such as 'i' or 'f8', got {code!r}")
        return CODES[code]

    @property
    def typechar(self) -> str:
        """The character that NumPy has for the type, V if it has none."""
        if not self:
            return ""
        code = self._layout.code or "V"
        return code if len(code) == 1 else np.dtype(code).char

    @property
    def typestr(self) -> str:
        """The type string that NumPy has for the type, Vn if it has none."""
        if not self:
            return ""
        code = self._layout.code
        return {"c": "S1", "U": "U1"}.get(code) or (np.dtype(code).str[1:] if code else f"V{self.extent}")


def _handle(layout: Layout | None) -> Datatype:
    known = NAMED.get(id(layout))
    return Datatype._of(layout) if known is None else known


def _real_size(p: int, r: int) -> int:
    """Return the bytes of a real number with `p` digits and exponents up to `r`."""
    for size, digits, exponent in ((4, 6, 37), (8, 15, 307)):
        if p <= digits and r <= exponent:
            return size
    raise failure(ERR_ARG, f"expected at most 15 digits and exponents up to 307, got {p} and {r}")


def _recreate(cls: type[Datatype], origin: Datatype, combiner: str, arguments: dict[str, Any]) -> Datatype:
    """Make a pickled datatype."""
    made: Datatype = getattr(cls(origin), f"Create_{combiner.lower()}")(**arguments)
    return made
