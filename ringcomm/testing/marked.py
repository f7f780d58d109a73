"""Tests marked with `ranks`, for the plugin of pytest (bindings/pytest_ringcomm.py)."""

import ast
import importlib
import pickle
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from inspect import iscoroutinefunction
from types import CodeType, ModuleType
from typing import Any, NamedTuple, cast

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

from ringcomm.communicator import Communicator
from ringcomm.errors import RingcommError, describe_error, refuse
from ringcomm.launcher.launch import launch
from ringcomm.testing.ranks import TIMEOUT, call, check_place, first_error

__all__ = ["FAILURE", "call_on_ranks", "places"]

FAILURE = pytest.StashKey[Any]()  # what pytest shows of the rank that failed


class RankSpec(NamedTuple):
    """What a mark says of the ranks of a test."""

    size: int
    world: str
    env: Mapping[str, str] | None
    fresh: bool

    def __str__(self) -> str:
        return f"{self.size} {self.world}"


def places(metafunc: pytest.Metafunc, mark: pytest.Mark, worlds: Sequence[str]) -> list[RankSpec]:
    """Return where the mark lets a test run; in these worlds if it names none."""
    try:
        found = ranks(worlds, *mark.args, **mark.kwargs)
        if "comm" not in metafunc.fixturenames:
            raise refuse("arguments", "comm among them, the communicator of the rank", metafunc.function.__name__)
        if iscoroutinefunction(metafunc.function):
            raise refuse("test", "a function, not a coroutine", metafunc.function.__name__)
    except (RingcommError, TypeError) as error:
        raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: the mark ranks: {error}") from None
    return found


def ranks(
    worlds: Sequence[str],
    *sizes: int,
    world: str | None = None,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> list[RankSpec]:
    if not sizes:
        raise refuse("sizes", "at least one number of ranks", "none")
    world = world or ("processes" if env else None)
    found = [RankSpec(size, each, env, fresh) for size in sizes for each in ([world] if world else worlds)]
    for place in found:
        check_place(place.size, place.world, place.env)
    return found


def call_on_ranks(item: pytest.Function) -> None:
    """Call a test on its ranks, and raise what it raises on one of them."""
    __tracebackhide__ = True
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    place = cast(RankSpec, arguments.pop("comm"))
    if place.world == "threads":
        launch(_call, place.size, world="threads", args=(item.obj,), kwargs=arguments, timeout=TIMEOUT)
        return
    path, options = str(item.path), item.config.option
    request = item.module.__name__, path, _pickled(item.obj, arguments)
    describe = partial(_describe, path, options.tbstyle, options.showlocals)
    outcomes = call(_load_and_call, request, place.size, place.env, describe, place.fresh)
    failed = first_error(outcomes)
    if not failed or not failed.error:
        if reasons := [outcome.value for outcome in outcomes if outcome.value is not None]:
            pytest.skip(reasons[0])
        return
    if not failed.description:
        pytest.fail(f"{failed.error}", pytrace=False)
    failed.description.addsection(f"on rank {failed.rank} of {place.size}", "")
    item.stash[FAILURE] = failed.description
    raise failed.error


def _pickled(function: Any, arguments: dict[str, Any]) -> bytes:
    for name, value in arguments.items():
        if reason := _why_not_pickled(value):
            text = f"argument {name}: expected an object that can be pickled, got {reason}"
            pytest.fail(f"{text}; ranks that are threads take it: world='threads'", pytrace=False)
    if reason := _why_not_pickled(function):
        pytest.fail(f"expected a test that ranks find by its name, got {reason}", pytrace=False)
    return pickle.dumps((function, arguments))


def _why_not_pickled(value: Any) -> str:
    try:
        pickle.dumps(value)
    except Exception as error:  # an object may raise any error
        return describe_error(error)
    return ""


# --- On a rank --------------------------------------------------------------------------------------------------------


def _call(comm: Communicator, function: Any, **arguments: Any) -> None:
    function(comm=comm, **arguments)


def _load_and_call(comm: Communicator, module: str, path: str, data: bytes) -> str | None:
    """Return the reason for which the rank has skipped the test, if it has."""
    if module not in sys.modules:
        _load(module, path)
    function, arguments = pickle.loads(data)
    try:
        function(comm=comm, **arguments)
    except pytest.skip.Exception as skip:  # which cannot be pickled
        return str(skip)
    return None


def _load(name: str, path: str) -> None:
    """Import a module of tests from its file, for which `sys.path` need not lead there."""
    parts = name.split(".")
    for package in (".".join(parts[:end]) for end in range(1, len(parts))):
        try:
            importlib.import_module(package)
        except ImportError:  # of a folder, whose tests pytest imports by importlib
            sys.modules[package] = ModuleType(package)
    loader = _TestLoader(name, path)
    spec = spec_from_loader(name, loader)
    assert spec
    sys.modules[name] = module_from_spec(spec)
    try:
        loader.exec_module(sys.modules[name])
    except BaseException:
        del sys.modules[name]
        raise


class _TestLoader(SourceFileLoader):
    """Lets assertions show their values, as in the process of pytest."""

    def get_code(self, _: str) -> CodeType:
        source = self.get_data(self.path)
        tree = ast.parse(source, self.path)
        rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


def _describe(path: str, style: Any, showlocals: bool, error: BaseException) -> Any:
    """Return what pytest shows of an error: from the first frame in the file of the test on."""
    info = pytest.ExceptionInfo.from_exception(error)
    info.traceback = info.traceback.cut(path=path)
    return info.getrepr(style="long" if style == "auto" else style, showlocals=showlocals)
