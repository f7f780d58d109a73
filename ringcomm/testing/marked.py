"""Tests marked with `ranks`, for the plugin of pytest (bindings/pytest_ringcomm.py)."""

import ast
import importlib
import pickle
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from inspect import iscoroutinefunction
from itertools import accumulate
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, cast

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

from ringcomm.communicator import Communicator
from ringcomm.errors import RingcommError, describe_error, refuse
from ringcomm.launcher.launch import launch
from ringcomm.testing.ranks import TIMEOUT, call, check_ranks, first_error

__all__ = ["FAILURE", "call_on_ranks", "rank_specs"]

Verdict = tuple[str, str]  # the name of pytest.skip or pytest.xfail, and the reason
FAILURE = pytest.StashKey[Any]()  # what pytest shows of the rank that failed


class RankSpec(NamedTuple):
    """What a mark says of the ranks of a test."""

    size: int
    world: str
    env: Mapping[str, str] | None
    fresh: bool

    def __str__(self) -> str:
        return f"{self.size} {self.world}"


def rank_specs(metafunc: pytest.Metafunc, mark: pytest.Mark, worlds: Sequence[str]) -> list[RankSpec]:
    """Return where the mark lets a test run; in these worlds if it names none."""
    try:
        found = ranks(worlds, *mark.args, **mark.kwargs)
        if "comm" not in metafunc.definition._fixtureinfo.argnames:
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
    for spec in found:
        check_ranks(spec.size, spec.world, spec.env)
    return found


def call_on_ranks(item: pytest.Function) -> None:
    """Call a test on its ranks, and raise what it raises on one of them."""
    __tracebackhide__ = True
    if FAILURE in item.stash:  # of an earlier attempt
        del item.stash[FAILURE]
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    spec = cast(RankSpec, arguments.pop("comm"))
    if spec.world == "threads":
        _end(launch(_call_on_thread, spec.size, world="threads", args=(item.obj, arguments), timeout=TIMEOUT))
        return
    path, options = str(item.path), item.config.option
    request = item.module.__name__, path, _pickled(item.obj, arguments)
    describe = partial(_describe, path, options.tbstyle, options.showlocals)
    outcomes = call(_load_and_call, request, spec.size, spec.env, describe, spec.fresh)
    failed = first_error(outcomes)
    if not failed or not failed.error:
        _end([outcome.value for outcome in outcomes])
        return
    if not failed.description:
        pytest.fail(f"{failed.error}", pytrace=False)
    failed.description.addsection(f"on rank {failed.rank} of {spec.size}", "")
    item.stash[FAILURE] = failed.description
    raise failed.error


def _end(verdicts: Sequence["Verdict | None"]) -> None:
    """Skip the test if all ranks have, or let it fail as expected."""
    __tracebackhide__ = True
    for rank, verdict in enumerate(verdicts):
        if verdict and None in verdicts:
            pytest.fail(f"rank {rank} has called pytest.{verdict[0]}({verdict[1]!r}), others have not", pytrace=False)
        if verdict and verdict[0] == "skip":
            pytest.skip(verdict[1])
        if verdict:
            pytest.xfail(verdict[1])


def _pickled(function: Any, arguments: dict[str, Any]) -> bytes:
    for name, value in arguments.items():
        if isinstance(value, pytest.MonkeyPatch):
            _refuse(name, "a MonkeyPatch, which changes the process of pytest alone")
    try:
        return pickle.dumps((function, arguments))
    except Exception as error:  # an object may raise any error
        reason = describe_error(error)
    for name, value in arguments.items():
        if why := _why_not_pickled(value):
            _refuse(name, why)
    pytest.fail(f"expected a test that ranks find by its name, got {reason}", pytrace=False)


def _refuse(name: str, got: str) -> None:
    text = f"argument {name}: expected an object that can be pickled, got {got}"
    pytest.fail(f"{text}; ranks that are threads take it: world='threads'", pytrace=False)


def _why_not_pickled(value: Any) -> str:
    try:
        pickle.dumps(value)
    except Exception as error:
        return describe_error(error)
    return ""


# --- On a rank --------------------------------------------------------------------------------------------------------


def _call(comm: Communicator, function: Any, arguments: dict[str, Any]) -> Verdict | None:
    """Return what the rank has called to end the test, if it has: exceptions that cannot be pickled."""
    try:
        function(comm=comm, **arguments)
    except pytest.skip.Exception as skip:
        return "skip", str(skip)
    except pytest.xfail.Exception as expected:
        return "xfail", str(expected)
    return None


def _call_on_thread(comm: Communicator, function: Any, arguments: dict[str, Any]) -> Verdict | None:
    try:
        return _call(comm, function, arguments)
    except pytest.fail.Exception as error:  # as of pytest.raises: to launch it would be the end of the thread
        raise AssertionError(str(error)).with_traceback(error.__traceback__) from None


def _load_and_call(comm: Communicator, module: str, path: str, data: bytes) -> Verdict | None:
    if module not in sys.modules:
        _load(module, Path(path))
    return _call(comm, *pickle.loads(data))


def _load(name: str, path: Path) -> None:
    """Import a module of tests from its file, for which `sys.path` need not lead there."""
    parts = name.split(".")
    folders = reversed(path.parents[: len(parts) - 1])
    for package, folder in zip(accumulate(parts[:-1], "{}.{}".format), folders, strict=True):
        try:
            importlib.import_module(package)
        except ImportError:  # pytest has imported it by importlib
            _execute(package, _package_loader(package, folder), [str(folder)])
    _execute(name, _TestLoader(name, str(path)))


def _package_loader(name: str, folder: Path) -> SourceFileLoader | None:
    file = folder / "__init__.py"
    return SourceFileLoader(name, str(file)) if file.exists() else None


def _execute(name: str, loader: SourceFileLoader | None, folders: list[str] | None = None) -> None:
    spec = ModuleSpec(name, loader, is_package=folders is not None)
    if folders is not None:
        spec.submodule_search_locations = folders
    if loader:
        spec.origin, spec.has_location = loader.path, True
    sys.modules[name] = module_from_spec(spec)
    try:
        if loader:
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
