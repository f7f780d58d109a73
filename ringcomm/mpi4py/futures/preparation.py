"""What a worker does before its first task: it imports the main module of the root, and calls the initializer."""

import os
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["MainModule", "Preparation", "load_main", "main_module"]

MAIN = "__worker__"  # the name of the root's main module in a worker: its `if __name__ == "__main__":` is not run there


@dataclass(frozen=True)
class Preparation:
    """The options of an executor. It is pickled: call it in the worker.

    Attributes:
        path: Folders to append to sys.path.
        wdir: The folder to change to.
        env: Environment variables to set.
        initializer: A function to call, with the arguments `initargs`.
    """

    path: Iterable[str] = ()
    wdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    initializer: Callable[..., object] | None = None
    initargs: tuple[Any, ...] = ()

    def __call__(self) -> None:
        sys.path.extend(self.path)
        if self.wdir is not None:
            os.chdir(self.wdir)
        os.environ.update(self.env)
        if self.initializer is not None:
            self.initializer(*self.initargs)


class MainModule(NamedTuple):
    """How a worker imports the main module of the root: by its name, or else from its path."""

    name: str | None
    path: str | None
    search: list[str]  # sys.path
    arguments: list[str]  # sys.argv


def main_module() -> MainModule:
    """Return that of this process."""
    main = sys.modules["__main__"]
    sys.modules[MAIN] = main  # where pickle looks for the class of an object that a worker returns
    spec = getattr(main, "__spec__", None)
    path = None if spec else getattr(main, "__file__", None)
    return MainModule(spec and spec.name, path and os.path.abspath(path), sys.path, sys.argv)


def load_main(root: MainModule) -> None:
    """Import the main module of the root as `__main__`, unless this process has it or it is not in a file."""
    mine = main_module()
    if mine[:2] == root[:2] or (root.name or "").endswith("__main__"):
        return
    sys.path[:], sys.argv[:] = root.search, root.arguments
    if root.name:
        variables = runpy.run_module(root.name, run_name=MAIN, alter_sys=True)
    elif root.path and os.path.exists(root.path):
        variables = runpy.run_path(root.path, run_name=MAIN)
    else:
        return
    module = ModuleType(MAIN)
    vars(module).update(variables)
    sys.modules["__main__"] = sys.modules[MAIN] = module
