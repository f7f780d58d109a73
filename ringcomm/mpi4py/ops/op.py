"""Operations of reductions: handles, and how arrays are combined."""

from collections.abc import Callable, Sequence
from typing import Any, Self
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from ringcomm.mpi4py.base.buffer import buffer
from ringcomm.mpi4py.base.errors import ERR_OP, ERR_TYPE, failure
from ringcomm.mpi4py.base.handles import Handle, constant
from ringcomm.mpi4py.buffers.specification import received, sent
from ringcomm.mpi4py.datatypes.datatype import handle_of
from ringcomm.mpi4py.datatypes.layout import Layout
from ringcomm.types import DTYPES, OPS, reducible

__all__ = ["OP_NULL", "Array", "Op", "Operation"]

MAX_OPS = 32  # user-defined operations that mpi4py allows
LOGICAL = ("land", "lor", "lxor")  # of booleans the same as those of bits

Array = NDArray[Any]


class Operation:
    """What an operation computes.

    Attributes:
        name: Empty for a user-defined one.
        call: The function of two objects; of a user-defined one, of two objects and None or two buffers and a datatype.
        arrays: The function of two arrays; None for a user-defined one.
        kinds: The kinds of dtypes that it takes; V is a pair.
        commutative: Whether the order of the arguments is free.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        arrays: Callable[[Array, Array], Array] | None = None,
        kinds: str = "",
        commutative: bool = True,
    ) -> None:
        self.name, self.call, self.arrays, self.kinds, self.commutative = name, call, arrays, kinds, commutative
        self.native: dict[np.dtype[Any], str | None] = {}  # what native_for has found


_created: WeakSet[Operation] = WeakSet()


class Op(Handle):
    """A reduction operation."""

    _object: Operation | None
    _named: Operation
    _null = ERR_OP, "an operation", "OP_NULL"

    def __call__(self, x: Any, y: Any) -> Any:
        """Return x op y, of objects."""
        if self._object is None:
            raise ValueError("OP_NULL cannot be called")
        return self._object.call(x, y) if self._object.name else self._object.call(x, y, None)

    def __reduce__(self) -> Any:
        if self._object is None or self._object.name:
            return super().__reduce__()
        return type(self).Create, (self._object.call, self._object.commutative)

    @classmethod
    def Create(cls, function: Callable[[Any, Any, Any], Any], commute: bool = False) -> Self:
        """Create an operation: function(x, y, datatype) computes y = x op y in two buffers.

        For objects it returns x op y; there the datatype is None.
        """
        if not callable(function):
            raise TypeError(f"expected a function, got {type(function).__name__}")
        if len(_created) >= MAX_OPS:
            raise RuntimeError(f"more than {MAX_OPS} user-defined operations; free some of them")
        operation = Operation("", function, commutative=bool(commute))
        _created.add(operation)
        return cls._of(operation)

    def toint(self) -> int:
        """Return the number of a predefined operation, -1 for a user-defined one."""
        return super().toint() if self.is_predefined else -1

    py2f = toint

    def Is_commutative(self) -> bool:
        """Return whether the order of the arguments is free."""
        return self._named.commutative

    is_commutative = property(Is_commutative)

    @property
    def is_predefined(self) -> bool:
        """Whether it is one of the constants."""
        return self._object is None or self._object.name != ""

    _is_predefined = is_predefined

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Compute inoutbuf = inbuf op inoutbuf."""
        source, target = sent(inbuf), received(inoutbuf)
        if source.layout is not target.layout or source.count != target.count:
            raise ValueError("the buffers differ in datatype or count")
        result = self.fold([source.data(), target.data()], target.layout)
        target.target()[:] = result
        target.store()

    def native_for(self, dtype: np.dtype[Any]) -> str | None:
        """Return the name of ringcomm's operation with the same result, None if there is none."""
        operation = self._named
        if dtype not in operation.native:
            name = operation.name.lower()
            if dtype == np.bool_ and name in LOGICAL:
                name = "b" + name[1:]
            supported = name in OPS and dtype.name in DTYPES and dtype.kind in operation.kinds
            operation.native[dtype] = name if supported and reducible(dtype.name, name) else None
        return operation.native[dtype]

    def fold(self, arrays: Sequence[Array], layout: Layout) -> Array:
        """Return a0 op a1 op …, of arrays of packed elements."""
        operation = self._named
        if operation.arrays is None:
            return self._fold_by_user(arrays, layout)
        base = arrays[0].dtype if layout.base is None else layout.base
        if base.kind not in operation.kinds:
            raise failure(ERR_OP, f"MPI_{operation.name} is not defined for elements of {base}")
        result = arrays[0].copy()
        for array in arrays[1:]:
            result = operation.arrays(result, array).astype(base, copy=False)
        return result

    def _fold_by_user(self, arrays: Sequence[Array], layout: Layout) -> Array:
        # The function computes inout = in op inout: the last array comes first.
        count, datatype = arrays[0].nbytes // max(layout.size, 1), handle_of(layout)
        inout = _laid_out(arrays[-1], layout, count)
        for array in arrays[-2::-1]:
            self._named.call(_laid_out(array, layout, count), inout, datatype)
        return layout.pack(inout.view(np.ndarray), -layout.lb, count)


def _laid_out(array: Array, layout: Layout, count: int) -> buffer:
    """Return a buffer with the elements as they are laid out, from the lower bound on."""
    lb, extent, end = layout.lb, layout.extent, layout.true_lb + layout.true_extent
    if extent < 0 or layout.true_lb < lb:
        expected = "a datatype whose data lies after its lower bound, with an extent >= 0, for a user-defined operation"
        raise failure(ERR_TYPE, f"expected {expected}; got data from {layout.true_lb} on, {lb=}, {extent=}")
    length = max(count * extent, (count - 1) * extent + end - lb)  # of a resized type, the last element may be longer
    data = buffer.allocate(length, clear=not layout.contiguous)
    layout.unpack(array, data.view(np.ndarray), -layout.lb, count)
    return data


OP_NULL: Op = constant("OP_NULL", Op())
