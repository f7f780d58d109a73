"""The options that hold: those of mpi4py.rc and of the environment, as they are when MPI is imported."""

import os
import warnings
from typing import Any

from ringcomm.mpi4py import DEFAULTS, Rc, rc

__all__ = ["options"]

YES, NO = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")
NAMES = {
    "thread_level": ("single", "funneled", "serialized", "multiple"),
    "errors": ("exception", "default", "fatal", "abort"),
    "finalize": (None, True, False),
}


def _option(name: str) -> Any:
    """Return the value of an option; the default, with a warning, if it is none that the option has."""
    default, value = DEFAULTS[name], getattr(rc, name)
    if text := os.environ.get(f"MPI4PY_RC_{name.upper()}", "").lower():
        value = _value(text, default)
        setattr(rc, name, value)
    fits = isinstance(value, int) and value >= 0 if type(default) is int else value in NAMES.get(name, (True, False))
    if not fits:
        warnings.warn(f"mpi4py.rc.{name}: unexpected value {value!r}", RuntimeWarning, stacklevel=2)
    return value if fits else default


def _value(text: str, default: object) -> object:
    if text.isdigit() and type(default) is int:  # a bool is no such int
        return int(text)
    return True if text in YES else False if text in NO else text


options = Rc(**{name: _option(name) for name in DEFAULTS})
