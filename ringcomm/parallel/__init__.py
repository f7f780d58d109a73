"""Data, tensor and pipeline parallelism for torch, in files one can read in an evening.

It speaks torch.distributed, so it runs on ringcomm, Gloo or NCCL alike. Nothing is global: what a model needs to know
of the ranks is a `Grid`, which is passed to it.

The names below are imported when they are first used, so that the schedules can be looked at where torch is missing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringcomm.parallel.grid import Axis, Grid

__all__ = ["Axis", "Grid"]

MODULES = ("grid",)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in (import_module(f"{__name__}.{module}") for module in MODULES):
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
