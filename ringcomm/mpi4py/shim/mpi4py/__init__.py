"""The name `mpi4py` for ringcomm.mpi4py: every module is one object under both names."""

import importlib
import importlib.util
import sys
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

ALIAS, REAL = "mpi4py", "ringcomm.mpi4py"
IN_PYTHON = ("mpi4py.bench", "mpi4py.typing", "mpi4py.util")


class AliasFinder(MetaPathFinder):
    """Finds the modules of mpi4py in ringcomm.mpi4py."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if not fullname.startswith(f"{ALIAS}."):
            return None
        found = importlib.util.find_spec(real(fullname))
        if found is None:
            if fullname in IN_PYTHON:
                text = f"no module {fullname!r}: that of mpi4py runs on ringcomm, too; install it: pip install mpi4py"
                raise ModuleNotFoundError(text, name=fullname)
            return None
        spec = ModuleSpec(fullname, AliasLoader(), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        spec.has_location = found.has_location
        return spec


class AliasLoader(InspectLoader):
    """Replaces a module that is being loaded by the real one; `python -m` runs the code of the real one."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(real(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        code: CodeType | None = _loader(fullname).get_code(real(fullname))
        return code

    def get_source(self, fullname: str) -> str | None:
        text: str | None = _loader(fullname).get_source(real(fullname))
        return text


def real(name: str) -> str:
    return REAL + name.removeprefix(ALIAS)


def _loader(name: str) -> Any:
    """Return the loader of the real module: an InspectLoader, or what an editable install has in its place."""
    spec = importlib.util.find_spec(real(name))
    assert spec is not None
    return spec.loader


sys.meta_path.insert(0, AliasFinder())
sys.modules[ALIAS] = importlib.import_module(REAL)
sys.modules[f"{ALIAS}.rc"] = sys.modules[f"{REAL}.rc"]  # an object, not a file
