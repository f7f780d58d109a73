"""The public API is typed: whatever the packages export, and a program that mypy checks as it does a user's."""

import inspect
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import typed_program

import harness
from ringcomm.mpi4py import MPI

ROOT = Path(__file__).parents[2]
MODULES = (
    *("ringcomm", "ringcomm.parallel", "ringcomm.parameter_server", "ringcomm.pipelining", "ringcomm.pretrained"),
    *("ringcomm.testing", "ringcomm.torch", "ringcomm.mpi4py", MPI.__name__, "ringcomm.mpi4py.futures"),
)


@pytest.mark.parametrize("name", MODULES)
def test_all_parameters_and_results_are_annotated(name):
    module = import_module(name)
    exported = getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
    functions = [(f"{each}{part}", function) for each in exported for part, function in functions_of(module, each)]
    assert functions
    assert {label: missing(function) for label, function in functions if missing(function)} == {}


def functions_of(module, name):
    """Yield (name, function) of a function, or of each public method and property of a class and its bases here."""
    value = getattr(module, name)
    if inspect.isfunction(value):
        yield "", value
    for base in value.__mro__ if inspect.isclass(value) else ():
        for member, found in vars(base).items():
            if isinstance(found, property):
                found = found.fget
            elif isinstance(found, (classmethod, staticmethod)):
                found = found.__func__
            if inspect.isfunction(found) and (member == "__init__" or not member.startswith("_")):
                yield f".{member}", found


def missing(function):
    """Return what has no annotation; nothing for a function of another library, which mypy knows by its own stubs."""
    if not function.__module__.startswith("ringcomm") or not inspect.getfile(function).startswith(str(ROOT)):
        return []
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.annotation is each.empty and each.name not in ("self", "cls")]
    return names + ["return"] * ("return" not in function.__annotations__)


def test_mypy_checks_a_program_that_uses_the_api():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["mypy"]["strict"]
    assert str(Path(typed_program.__file__).relative_to(ROOT)) in project["tool"]["mypy"]["files"]


def test_that_program_runs():
    assert harness.run(typed_program.program, 2, world="threads") == [3.0, 3.0]
