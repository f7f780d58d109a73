"""The predefined datatypes, and the datatypes of the formats of buffers."""

from typing import Any

import numpy as np

from ringcomm.mpi4py.base.constants import TYPECLASS_COMPLEX, TYPECLASS_INTEGER, TYPECLASS_LOGICAL, TYPECLASS_REAL
from ringcomm.mpi4py.base.handles import constant
from ringcomm.mpi4py.datatypes.datatype import BY_SIZE, CODES, NAMED, PAIRS, Datatype
from ringcomm.mpi4py.datatypes.layout import Layout, basic, pair


def discover(element: str) -> Layout:
    """Return the layout of the elements of a buffer, from their format.

    Raises KeyError if there is none, and BufferError if they are not in native byte order.
    """
    if element[0] in "@<":
        element = element[1:]
    elif element[0] in ">!=#^|":
        raise BufferError(f"expected elements in native byte order, got those of format {element!r}")
    return (BYTE if element == "B" else find_type(element))._named


def find_type(datatype: Any) -> Datatype:
    """Return a datatype, or that of a code; raise KeyError if there is none."""
    if isinstance(datatype, Datatype):
        return datatype
    if not isinstance(datatype, str):
        raise TypeError(f"expected a datatype or its code, such as 'i' or 'f8', got {type(datatype).__name__}")
    if datatype not in CODES:
        raise KeyError(f"expected a datatype or its code, such as 'i' or 'f8', got {datatype!r}")
    return CODES[datatype]


def _predefine(name: str, code: str, layout: Layout | None = None) -> Datatype:
    """Name a datatype. CHAR, and WCHAR, are numbers in reductions."""
    layout = layout or basic({"c": np.int8, "U": np.uint32}.get(code, code))
    layout.code, layout.name = code, f"MPI_{name}"
    handle: Datatype = constant(name, Datatype._of(layout))
    NAMED[id(layout)] = handle
    return handle


DATATYPE_NULL: Datatype = constant("DATATYPE_NULL", Datatype())
NAMED[id(None)] = DATATYPE_NULL

PACKED, BYTE = _predefine("PACKED", "B"), _predefine("BYTE", "B")
AINT, OFFSET, COUNT = _predefine("AINT", "p"), _predefine("OFFSET", "p"), _predefine("COUNT", "p")
CHAR, WCHAR = _predefine("CHAR", "c"), _predefine("WCHAR", "U")
SIGNED_CHAR, UNSIGNED_CHAR = _predefine("SIGNED_CHAR", "b"), _predefine("UNSIGNED_CHAR", "B")
SHORT, UNSIGNED_SHORT = _predefine("SHORT", "h"), _predefine("UNSIGNED_SHORT", "H")
INT, UNSIGNED = _predefine("INT", "i"), _predefine("UNSIGNED", "I")
LONG, UNSIGNED_LONG = _predefine("LONG", "l"), _predefine("UNSIGNED_LONG", "L")
LONG_LONG, UNSIGNED_LONG_LONG = _predefine("LONG_LONG", "q"), _predefine("UNSIGNED_LONG_LONG", "Q")
FLOAT, DOUBLE, LONG_DOUBLE = _predefine("FLOAT", "f"), _predefine("DOUBLE", "d"), _predefine("LONG_DOUBLE", "g")
C_BOOL = _predefine("C_BOOL", "b1")
INT8_T, UINT8_T = _predefine("INT8_T", "i1"), _predefine("UINT8_T", "u1")
INT16_T, UINT16_T = _predefine("INT16_T", "i2"), _predefine("UINT16_T", "u2")
INT32_T, UINT32_T = _predefine("INT32_T", "i4"), _predefine("UINT32_T", "u4")
INT64_T, UINT64_T = _predefine("INT64_T", "i8"), _predefine("UINT64_T", "u8")
FLOAT16_T, FLOAT32_T, FLOAT64_T = _predefine("FLOAT16_T", "e"), FLOAT, DOUBLE
C_COMPLEX, C_DOUBLE_COMPLEX = _predefine("C_COMPLEX", "F"), _predefine("C_DOUBLE_COMPLEX", "D")
C_FLOAT_COMPLEX, C_LONG_DOUBLE_COMPLEX = C_COMPLEX, _predefine("C_LONG_DOUBLE_COMPLEX", "G")
CXX_BOOL, CXX_FLOAT_COMPLEX = _predefine("CXX_BOOL", "?"), _predefine("CXX_FLOAT_COMPLEX", "F")
CXX_DOUBLE_COMPLEX = _predefine("CXX_DOUBLE_COMPLEX", "D")
CXX_LONG_DOUBLE_COMPLEX = _predefine("CXX_LONG_DOUBLE_COMPLEX", "G")

CHARACTER, LOGICAL, INTEGER = _predefine("CHARACTER", "c"), _predefine("LOGICAL", "i"), _predefine("INTEGER", "i")
REAL, DOUBLE_PRECISION = _predefine("REAL", "f"), _predefine("DOUBLE_PRECISION", "d")
COMPLEX, DOUBLE_COMPLEX = _predefine("COMPLEX", "F"), _predefine("DOUBLE_COMPLEX", "D")
LOGICAL1, LOGICAL2 = _predefine("LOGICAL1", "i1"), _predefine("LOGICAL2", "i2")
LOGICAL4, LOGICAL8 = _predefine("LOGICAL4", "i4"), _predefine("LOGICAL8", "i8")
INTEGER1, INTEGER2 = _predefine("INTEGER1", "i1"), _predefine("INTEGER2", "i2")
INTEGER4, INTEGER8 = _predefine("INTEGER4", "i4"), _predefine("INTEGER8", "i8")
REAL2, REAL4, REAL8 = _predefine("REAL2", "f2"), _predefine("REAL4", "f4"), _predefine("REAL8", "f8")
COMPLEX8, COMPLEX16 = _predefine("COMPLEX8", "c8"), _predefine("COMPLEX16", "c16")
# NumPy has no such numbers.
BFLOAT16_T = LOGICAL16 = INTEGER16 = REAL16 = COMPLEX4 = COMPLEX32 = DATATYPE_NULL

SHORT_INT = _predefine("SHORT_INT", "", pair(SHORT._named, INT._named))
INT_INT = _predefine("INT_INT", "", pair(INT._named, INT._named))
LONG_INT = _predefine("LONG_INT", "", pair(LONG._named, INT._named))
FLOAT_INT = _predefine("FLOAT_INT", "", pair(FLOAT._named, INT._named))
DOUBLE_INT = _predefine("DOUBLE_INT", "", pair(DOUBLE._named, INT._named))
LONG_DOUBLE_INT = _predefine("LONG_DOUBLE_INT", "", pair(LONG_DOUBLE._named, INT._named))
TWOINT = INT_INT
INT_INT.Set_name("MPI_2INT")
LONG_LONG.Set_name("MPI_LONG_LONG_INT")

UNSIGNED_INT, SIGNED_SHORT, SIGNED_INT, SIGNED_LONG, SIGNED_LONG_LONG = UNSIGNED, SHORT, INT, LONG, LONG_LONG
BOOL, SINT8_T, SINT16_T, SINT32_T, SINT64_T = C_BOOL, INT8_T, INT16_T, INT32_T, INT64_T
F_BOOL, F_INT, F_FLOAT, F_DOUBLE = LOGICAL, INTEGER, REAL, DOUBLE_PRECISION
F_COMPLEX = F_FLOAT_COMPLEX = COMPLEX
F_DOUBLE_COMPLEX = DOUBLE_COMPLEX

PAIRS |= {
    (id(value._object), id(INT._object)): both
    for value, both in (
        *((SHORT, SHORT_INT), (INT, INT_INT), (LONG, LONG_INT)),
        *((FLOAT, FLOAT_INT), (DOUBLE, DOUBLE_INT), (LONG_DOUBLE, LONG_DOUBLE_INT)),
    )
}
BY_SIZE |= {
    (typeclass, datatype.size): datatype
    for typeclass, datatypes in (
        (TYPECLASS_LOGICAL, (LOGICAL1, LOGICAL2, LOGICAL4, LOGICAL8)),
        (TYPECLASS_INTEGER, (INTEGER1, INTEGER2, INTEGER4, INTEGER8)),
        (TYPECLASS_REAL, (REAL2, REAL4, REAL8)),
        (TYPECLASS_COMPLEX, (COMPLEX8, COMPLEX16)),
    )
    for datatype in datatypes
}

# The types of the C codes, then of names that NumPy and PEP 3118 have beside them.
CODES |= {
    datatype.tocode(): datatype
    for datatype in (
        *(AINT, CHAR, WCHAR, SIGNED_CHAR, UNSIGNED_CHAR, SHORT, UNSIGNED_SHORT, INT, UNSIGNED, LONG, UNSIGNED_LONG),
        *(LONG_LONG, UNSIGNED_LONG_LONG, FLOAT16_T, FLOAT, DOUBLE, LONG_DOUBLE, C_BOOL, INT8_T, UINT8_T, INT16_T),
        *(UINT16_T, INT32_T, UINT32_T, INT64_T, UINT64_T, C_COMPLEX, C_DOUBLE_COMPLEX, C_LONG_DOUBLE_COMPLEX),
    )
}
for _datatype, _codes in (
    *((C_BOOL, "?"), (COUNT, "n"), (UNSIGNED_LONG, "N P"), (UINT16_T, "u 1u"), (INT64_T, "M M8 m m8")),
    *((CHAR, "a S S1 s 1s"), (WCHAR, "U1 w 1w"), (FLOAT16_T, "f2"), (FLOAT, "f4"), (DOUBLE, "f8")),
    *((LONG_DOUBLE, LONG_DOUBLE.typestr), (C_COMPLEX, "Zf c8"), (C_DOUBLE_COMPLEX, "Zd c16")),
    (C_LONG_DOUBLE_COMPLEX, f"Zg {C_LONG_DOUBLE_COMPLEX.typestr}"),
):
    CODES |= dict.fromkeys(_codes.split(), _datatype)

# The codes of C, and those of Fortran, which mean other types.
C_CODES = {
    code: CODES[code]
    for code in (
        *("?bhilqBHILQfdgFDG"),
        *("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"),
        *(LONG_DOUBLE.typestr, C_LONG_DOUBLE_COMPLEX.typestr),
    )
}
F_CODES = {"l": LOGICAL, "i": INTEGER, "r": REAL, "s": REAL, "d": DOUBLE_PRECISION, "c": COMPLEX, "z": DOUBLE_COMPLEX}
F_CODES |= {f"{' ircl'[typeclass]}{size}": datatype for (typeclass, size), datatype in BY_SIZE.items()}

# The layouts of NumPy's numbers, by their character: as `discover`, but in 50 ns.
BY_CHAR = {char: CODES[char]._named for char in "?bhHiIlLqQefdgFDGmM"} | {"B": BYTE._named}


def typecode(datatype: Datatype) -> str | None:
    """Return the code of a predefined type of one number, None for others."""
    return datatype._named.code or None if datatype else None


__all__ = [name for name, value in globals().items() if isinstance(value, Datatype) and name.isupper()]
