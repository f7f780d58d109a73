"""Python runs this file at the start of every process of PyTorch's tests, also of those that they spawn.

Where a test makes a group on Gloo, it gets one on SUITE_BACKEND, and its name is appended to the file SUITE_GROUPS. The
processes of ranks are forked from one that has imported the module SUITE_MODULE: that saves most of their time.
"""

import multiprocessing
import multiprocessing.context
import multiprocessing.spawn
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

C10D = "torch.distributed.distributed_c10d"


class AtImport(MetaPathFinder):
    """Changes c10d when it is imported: to import torch here would hide what a test sets before it does."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != C10D:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            replace_gloo(module)

        loader.exec_module = exec_module
        return spec


def replace_gloo(c10d: Any) -> None:
    theirs = c10d._new_process_group_helper

    def helper(size: int, rank: int, ranks: list[int], backend: str, *arguments: Any, **options: Any) -> Any:
        backend = {"undefined": "cpu:gloo"}.get(backend, backend)  # where the test names none
        if "gloo" in backend:
            test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[2].replace("::", ".")
            with Path(os.environ["SUITE_GROUPS"]).open("a") as file:
                file.write(test.rpartition(" (")[0] + "\n")
            backend = c10d.Backend(backend.replace("gloo", os.environ["SUITE_BACKEND"]))
        return theirs(size, rank, ranks, backend, *arguments, **options)

    c10d._new_process_group_helper = helper


def fork_ranks() -> None:
    """Let torch fork ranks where it spawns them, with the environment of the process that starts them."""
    context: Any = multiprocessing.context
    context._concrete_contexts["spawn"] = context._concrete_contexts["forkserver"]
    multiprocessing.set_forkserver_preload([os.environ["SUITE_MODULE"]])
    spawn: Any = multiprocessing.spawn
    describe, prepare = spawn.get_preparation_data, spawn.prepare

    def describe_with_environment(name: str) -> dict[str, Any]:
        return {**describe(name), "environment": dict(os.environ)}

    def prepare_environment(data: dict[str, Any]) -> None:
        environment = data.pop("environment")
        for variable in os.environ.keys() - environment.keys():
            del os.environ[variable]
        os.environ.update(environment)
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = describe_with_environment, prepare_environment


sys.meta_path.insert(0, AtImport())
fork_ranks()
