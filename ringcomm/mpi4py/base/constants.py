"""The constants of MPI that are no handles. Numbers that programs may store are those of Open MPI."""

import operator
from typing import Any, ClassVar

UNDEFINED = -32766
ANY_SOURCE = -1
ANY_TAG = -1
PROC_NULL = -2
ROOT = -4


class Constant:
    """A constant that stands for an address."""

    _name: ClassVar[str]
    _value: ClassVar[int]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, type(self)):
            return True
        try:
            return self._value == operator.index(other)  # type: ignore[arg-type]  # what is no integer raises TypeError
        except TypeError:
            return NotImplemented

    def __hash__(self) -> int:
        return hash(self._value)

    def __bool__(self) -> bool:
        return self._value != 0

    def __int__(self) -> int:
        return self._value

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> Any:
        return self._name


class BottomType(Constant):
    """The type of BOTTOM."""

    _name, _value = "BOTTOM", 0

    def __index__(self) -> int:
        return self._value


class InPlaceType(Constant):
    """The type of IN_PLACE."""

    _name, _value = "IN_PLACE", 1


class BufferAutomaticType(Constant):
    """The type of BUFFER_AUTOMATIC."""

    _name, _value = "BUFFER_AUTOMATIC", 2


BOTTOM, IN_PLACE, BUFFER_AUTOMATIC = BottomType(), InPlaceType(), BufferAutomaticType()

VERSION, SUBVERSION = 4, 1
THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
IDENT, CONGRUENT, SIMILAR, UNEQUAL = range(4)
CART, GRAPH, DIST_GRAPH = 1, 2, 3
UNWEIGHTED, WEIGHTS_EMPTY = 2, 3
COMM_TYPE_SHARED, COMM_TYPE_HW_UNGUIDED, COMM_TYPE_HW_GUIDED, COMM_TYPE_RESOURCE_GUIDED = range(4)
BSEND_OVERHEAD = 128

KEYVAL_INVALID = -1
TAG_UB, IO, WTIME_IS_GLOBAL, APPNUM, LASTUSEDCODE, UNIVERSE_SIZE = 0, 2, 3, 4, 5, 6
WIN_BASE, WIN_SIZE, WIN_DISP_UNIT, WIN_CREATE_FLAVOR, WIN_MODEL = range(7, 12)
WIN_FLAVOR = WIN_CREATE_FLAVOR

MAX_PROCESSOR_NAME = MAX_ERROR_STRING = MAX_LIBRARY_VERSION_STRING = MAX_INFO_VAL = MAX_PORT_NAME = 256
MAX_INFO_KEY = 36
MAX_OBJECT_NAME = 64
MAX_DATAREP_STRING = 128
MAX_PSET_NAME_LEN = MAX_STRINGTAG_LEN = 512

ORDER_C, ORDER_FORTRAN = 0, 1
ORDER_F = ORDER_FORTRAN
TYPECLASS_INTEGER, TYPECLASS_REAL, TYPECLASS_COMPLEX, TYPECLASS_LOGICAL = 1, 2, 3, 4
DISTRIBUTE_BLOCK, DISTRIBUTE_CYCLIC, DISTRIBUTE_NONE, DISTRIBUTE_DFLT_DARG = 0, 1, 2, -1

COMBINER_NAMED, COMBINER_DUP, COMBINER_CONTIGUOUS, COMBINER_VECTOR = range(4)
COMBINER_HVECTOR, COMBINER_INDEXED = 5, 6  # 4, 7 and 10 are those of functions that MPI has no more
COMBINER_HINDEXED, COMBINER_INDEXED_BLOCK = 8, 9
COMBINER_STRUCT, COMBINER_SUBARRAY, COMBINER_DARRAY = 11, 12, 13
COMBINER_F90_REAL, COMBINER_F90_COMPLEX, COMBINER_F90_INTEGER = 14, 15, 16
COMBINER_RESIZED, COMBINER_HINDEXED_BLOCK, COMBINER_VALUE_INDEX = 17, 18, 19

# Of windows and files, which there are not: programs name them in arguments.
WIN_FLAVOR_CREATE, WIN_FLAVOR_ALLOCATE, WIN_FLAVOR_DYNAMIC, WIN_FLAVOR_SHARED = 1, 2, 3, 4
WIN_SEPARATE, WIN_UNIFIED = 0, 1
MODE_NOCHECK, MODE_NOPRECEDE, MODE_NOPUT, MODE_NOSTORE, MODE_NOSUCCEED = 1, 2, 4, 8, 16
LOCK_EXCLUSIVE, LOCK_SHARED = 1, 2
MODE_CREATE, MODE_RDONLY, MODE_WRONLY, MODE_RDWR, MODE_DELETE_ON_CLOSE = 1, 2, 4, 8, 16
MODE_UNIQUE_OPEN, MODE_EXCL, MODE_APPEND, MODE_SEQUENTIAL = 32, 64, 128, 256
SEEK_SET, SEEK_CUR, SEEK_END = 600, 602, 604
DISPLACEMENT_CURRENT = DISP_CUR = -54278278

__all__ = [name for name in dir() if name.isupper() or name.endswith("Type")]
