"""The class of datatypes: handles of layouts. predefined.py has the constants."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from ringcomm.mpi4py.base import constants
from ringcomm.mpi4py.base.attributes import Attributes
from ringcomm.mpi4py.base.buffer import buffer, find_device
from ringcomm.mpi4py.base.constants import TYPECLASS_COMPLEX, TYPECLASS_INTEGER, TYPECLASS_REAL
from ringcomm.mpi4py.base.errors import ERR_ARG, ERR_TRUNCATE, ERR_TYPE, failure
from ringcomm.mpi4py.base.handles import Handle
from ringcomm.mpi4py.base.integers import integral
from ringcomm.mpi4py.datatypes import constructors
from ringcomm.mpi4py.datatypes.layout import Layout

__all__ = ["BY_SIZE", "CODES", "NAMED", "PAIRS", "Datatype", "handle_of"]

# Filled by predefined.py: the constants by the id of their layout, by code, and for Match_size and Get_value_index.
NAMED: dict[int, Datatype] = {}
CODES: dict[str, Datatype] = {}
BY_SIZE: dict[tuple[int, int], Datatype] = {}
PAIRS: dict[tuple[int, int], Datatype] = {}

F90 = ("F90_INTEGER", "F90_REAL", "F90_COMPLEX")


def _constructor(make: Callable[..., Layout]) -> Callable[..., Any]:
    """Return the method that makes a datatype of this one, by a function of constructors.py."""
    make = integral(make)

    @wraps(make)
    def create(self: Datatype, *args: Any, **kwargs: Any) -> Datatype:
        return self._of(make(self._named, *args, **kwargs))

    create.__name__, create.__qualname__ = f"Create_{make.__name__}", f"Datatype.Create_{make.__name__}"
    return create


class Datatype(Attributes, Handle):
    """What one element of an array is, and where its data lies."""

    _object: Layout | None
    _named: Layout
    _null = ERR_TYPE, "a datatype", "DATATYPE_NULL"
    _attributes = property(lambda self: self._named.attributes)  # of all handles

    def __reduce__(self) -> Any:
        if not self or self.is_named:
            return super().__reduce__()
        return _recreate, (type(self), *self.decode())

    def Free(self) -> None:
        """Free the datatype. Types made from it stay valid."""
        if not self.is_predefined:
            self._delete_attributes()
        super().Free()

    def Commit(self) -> Self:
        """Return this datatype: all can be used at once."""
        self._named  # noqa: B018 (raises if the handle is null)
        return self

    # --- Properties ---------------------------------------------------------------------------------------------------

    def Get_size(self) -> int:
        """Return the bytes of data."""
        return self._named.size

    def Get_extent(self) -> tuple[int, int]:
        """Return the lower bound and the extent."""
        return self._named.lb, self._named.extent

    def Get_true_extent(self) -> tuple[int, int]:
        """Return the lower bound and the extent of the data."""
        return self._named.true_lb, self._named.true_extent

    size = property(Get_size)

    @property
    def lb(self) -> int:
        """Lower bound."""
        return self._named.lb

    @property
    def extent(self) -> int:
        """Extent."""
        return self._named.extent

    @property
    def ub(self) -> int:
        """Upper bound."""
        return sum(self.Get_extent())

    @property
    def true_lb(self) -> int:
        """Lower bound of the data."""
        return self._named.true_lb

    @property
    def true_extent(self) -> int:
        """Extent of the data."""
        return self._named.true_extent

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

    _is_predefined = is_predefined

    def Get_name(self) -> str:
        """Return the name."""
        return "MPI_DATATYPE_NULL" if self._object is None else self._object.name

    def Set_name(self, name: str) -> None:
        """Set the name."""
        self._named.name = name

    name = property(Get_name, Set_name)

    @property
    def combiner(self) -> int:
        """The number of the constructor."""
        return int(getattr(constants, f"COMBINER_{self._named.combiner}"))

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        """Return how many integers, addresses, counts and datatypes Get_contents returns, and the combiner."""
        integers, addresses = constructors.integers_and_addresses(self._named)
        return len(integers), len(addresses), 0, len(self._named.parts), self.combiner

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        """Return the arguments with which the datatype was made: integers, addresses, counts and datatypes.

        As on an MPI without large counts, all numbers are integers or addresses.
        """
        if self._named.combiner == "NAMED":
            raise failure(ERR_TYPE, f"expected a datatype made of others, got the predefined {self.name}")
        integers, addresses = constructors.integers_and_addresses(self._named)
        return integers, addresses, [], [handle_of(part) for part in self._named.parts]

    envelope, contents = property(Get_envelope), property(Get_contents)

    def decode(self) -> tuple[Datatype, str, dict[str, Any]]:
        """Return the datatype, the name of the combiner and the arguments from which this one was made."""
        layout = self._named
        if layout.combiner == "NAMED":
            return self, "NAMED", {}
        parts = [handle_of(part) for part in layout.parts]
        arguments = dict(layout.parameters) | ({"datatypes": parts} if layout.combiner == "STRUCT" else {})
        return parts[0] if len(parts) == 1 else handle_of(None), layout.combiner, arguments

    # --- Constructors -------------------------------------------------------------------------------------------------

    def Dup(self) -> Self:
        """Return a copy with the attributes that their keys say."""
        dup = self._of(constructors.duplicate(self._named))
        self._copy_attributes(dup)
        return dup

    Create_dup = Dup
    Create_contiguous = _constructor(constructors.contiguous)
    Create_vector = _constructor(constructors.vector)
    Create_hvector = _constructor(constructors.hvector)
    Create_indexed = _constructor(constructors.indexed)
    Create_hindexed = _constructor(constructors.hindexed)
    Create_indexed_block = _constructor(constructors.indexed_block)
    Create_hindexed_block = _constructor(constructors.hindexed_block)
    Create_subarray = _constructor(constructors.subarray)
    Create_darray = _constructor(constructors.darray)
    Create_resized = Resized = _constructor(constructors.resized)

    @classmethod
    def Create_struct(
        cls, blocklengths: Sequence[int], displacements: Sequence[int], datatypes: Sequence[Datatype]
    ) -> Self:
        """Return the type of blocks of several types with displacements in bytes."""
        return cls._of(constructors.structure(blocklengths, displacements, [each._named for each in datatypes]))

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
        layout = constructors.duplicate(BY_SIZE[typeclass, size]._named)
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
        return cls(PAIRS.get((id(value._named), id(index._named))))

    # --- Packing ------------------------------------------------------------------------------------------------------

    @integral
    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: object) -> int:  # noqa: ARG002 (all ranks have one format)
        """Pack a buffer into another, from a position in bytes. Returns the position after the data."""
        source, target = _on_host(inbuf, False), _on_host(outbuf, True)
        data = self._named.pack(source, 0, self._whole(source)).view(np.uint8)
        end = _checked(position) + data.size
        if end > target.size:
            raise failure(ERR_TRUNCATE, f"{data.size} bytes do not fit at position {position} of {target.size}")
        target[position:end] = data
        return end

    @integral
    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: object) -> int:  # noqa: ARG002 (as Pack)
        """Unpack from a position in bytes into a buffer. Returns the position after the data."""
        source, target = _on_host(inbuf, False), _on_host(outbuf, True)
        count = self._whole(target)
        end = _checked(position) + count * self._named.size
        if end > source.size:
            raise failure(ERR_TRUNCATE, f"expected {end} bytes, got {source.size}")
        self._named.unpack(source[position:end], target, 0, count)
        return end

    @integral
    def Pack_size(self, count: int, comm: object) -> int:  # noqa: ARG002 (as Pack)
        """Return the bytes that Pack needs for `count` elements."""
        return count * self._named.size

    def Pack_external(self, *_: object) -> NoReturn:
        """Raise NotImplementedError: there is no portable representation."""
        raise NotImplementedError("Pack_external: there is no external32; all ranks have one format, use Pack")

    Unpack_external = Pack_external_size = Pack_external

    def _whole(self, memory: NDArray[np.uint8]) -> int:
        """Return how many elements memory has."""
        extent = self._named.extent
        if extent <= 0:
            raise failure(ERR_TYPE, f"expected a datatype with a positive extent, got {extent}")
        return memory.size // extent

    # --- Codes --------------------------------------------------------------------------------------------------------

    def tocode(self) -> str:
        """Return the code that NumPy or the buffer protocol has for a predefined type."""
        if not self or not self._named.code:
            raise ValueError(f"expected a predefined datatype of one number, got {self.name or 'one without name'}")
        return self._named.code

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
        code = self._named.code or "V"
        return code if len(code) == 1 else np.dtype(code).char

    @property
    def typestr(self) -> str:
        """The type string that NumPy has for the type, Vn if it has none."""
        if not self:
            return ""
        code = self._named.code
        return {"c": "S1", "U": "U1"}.get(code) or (np.dtype(code).str[1:] if code else f"V{self.extent}")


def handle_of(layout: Layout | None) -> Datatype:
    """Return the constant of a layout, or a new handle."""
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


def _checked(position: int) -> int:
    if operator.index(position) < 0:
        raise failure(ERR_ARG, f"position: expected at least 0, got {position}")
    return position


def _on_host(obj: Any, writable: bool) -> NDArray[np.uint8]:
    data = buffer.frombuffer(obj, not writable)
    if find_device(data):
        raise NotImplementedError("Pack and Unpack take no memory on a GPU; copy it to the host")
    return data.view(np.ndarray)
