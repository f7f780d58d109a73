"""Integers as mpi4py takes them: objects with `__int__`, such as floats, whose fraction is dropped, or `__index__`."""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["integer", "integral"]

Call = TypeVar("Call", bound=Callable[..., Any])


def integer(value: Any) -> int:
    """Return the integer of an argument; a string is none."""
    return int(value) if hasattr(value, "__int__") else operator.index(value)


def integral(call: Call) -> Call:
    """Make a function take the arguments that are annotated with `int` as mpi4py takes them."""
    parameters = enumerate(inspect.signature(call).parameters.values())
    places = [(position, each.name) for position, each in parameters if each.annotation in (int, "int")]
    if not places:
        return call

    @functools.wraps(call)
    def converting(*args: Any, **kwargs: Any) -> Any:
        for position, name in places:
            if position < len(args):
                if type(args[position]) is not int:
                    args = (*args[:position], integer(args[position]), *args[position + 1 :])
            elif name in kwargs:
                kwargs[name] = integer(kwargs[name])
        return call(*args, **kwargs)

    return cast(Call, converting)
