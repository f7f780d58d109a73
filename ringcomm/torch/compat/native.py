"""The extension in C++ through which callers that torch has in C++ reach a group in Python.

It is optional. `python -m ringcomm.torch` builds it once, against the torch that is installed, whose ABI it uses. From
torch 2.14 on a Backend can be written in Python, and it is not needed.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ringcomm.config import cache_folder
from ringcomm.errors import ArgumentError, RingcommError

__all__ = ["BUILD", "PYTHON_BACKENDS", "backend_of", "build", "extension", "register", "result_after"]

PYTHON_BACKENDS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
BUILD = "python -m ringcomm.torch"  # the command

MODULE = "ringcomm_c10d"  # as in the source
SOURCE = Path(__file__).with_name("backend.cpp")
TORCH = Path(torch.__file__).parent
LIBRARIES = ("torch_python", "torch_cpu", "c10")

_at_exit: Any = None  # a weakref.finalize


@cache
def extension() -> Any:
    """Return the module that the source defines; None if it is not built."""
    try:
        library = _library()
    except ArgumentError:  # without a cache folder it cannot be built
        return None
    if PYTHON_BACKENDS or not library.exists():
        return None
    spec: Any = importlib.util.spec_from_file_location(MODULE, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def register(group: Any) -> None:
    """Make callers in C++ reach this group, where the extension is built. Those in Python go on calling it directly."""
    if module := extension():
        _note_group(module)
        backend = module.Backend(weakref.proxy(group), group.rank(), group.size())  # the group will own it
        for device in group._device_types:
            group._register_backend(device, group.BackendType.CUSTOM, backend)


def backend_of(group: Any) -> Any:
    """Return a Backend for a group of torch's own, which can have others beside it. It owns the group given."""
    module = extension()
    _note_group(module)
    return module.Backend(group, group.rank(), group.size())


def _note_group(module: Any) -> None:
    """Call `at_exit` before any open group is closed at exit, which wakes threads that wait in it."""
    global _at_exit
    if _at_exit:
        _at_exit.detach()
    _at_exit = weakref.finalize(module, module.at_exit)  # the last one made is called first


def result_after(done: "torch.futures.Future[Any]", work: Any) -> "torch.futures.Future[Any]":
    """Return the future of `work.result()` once `done` is complete.

    Without the extension hooks in C++ cannot use it, and it raises each error as a RuntimeError.
    """
    if module := extension():
        future: torch.futures.Future[Any] = module.result_after(done, work)
        return future
    # Only a callback that raises makes a future that C++ sees as failed.
    return done.then(lambda _: work.result())


# --- Building it ------------------------------------------------------------------------------------------------------


def build() -> Path:
    """Build the extension, unless it is built, and return the file."""
    library = _library()
    if not library.exists():
        library.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            part = Path(folder, library.name)
            _compile(part)
            part.replace(library)
    return library


def _library() -> Path:
    """Return the path of the extension for this source, this torch and this Python."""
    build = hashlib.sha256(repr((SOURCE.read_text(), _flags())).encode()).hexdigest()[:16]
    return cache_folder() / "torch" / f"{MODULE}-{torch.__version__}-{build}.{sysconfig.get_config_var('SOABI')}.so"


def _flags() -> list[str]:
    headers = TORCH / "include", TORCH / "include/torch/csrc/api/include", sysconfig.get_path("include")
    abi = [f"_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):  # of the pybind11 in older versions of torch
        if value := getattr(torch._C, f"_PYBIND11_{name}", None):
            abi.append(f'PYBIND11_{name}="{value}"')
    return ["-std=c++20", "-O1", "-fPIC", "-shared", *(f"-D{each}" for each in abi), *(f"-I{each}" for each in headers)]


def _compile(library: Path) -> None:
    name = os.environ.get("CXX", "c++")
    compiler = shutil.which(name)
    if compiler is None:
        raise ArgumentError(f"there is no C++ compiler {name}: install g++, or set CXX to the name of another one")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise ArgumentError("Python.h is missing: install the headers of Python (on Debian, the package python3-dev)")
    libraries = [f"-L{TORCH / 'lib'}", *(f"-l{name}" for name in LIBRARIES)]
    command = [compiler, *_flags(), str(SOURCE), "-o", str(library), *libraries]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RingcommError(f"{compiler} failed, status {done.returncode}:\n{done.stderr}")
