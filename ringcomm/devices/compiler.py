"""Compile the CUDA kernels by NVRTC, each at its first use, into a cache on disk."""

import hashlib
from contextlib import suppress
from typing import NamedTuple

from cupy_backends.cuda.libs import nvrtc

from ringcomm.config import cache_folder
from ringcomm.devices.contract import KernelVariant
from ringcomm.machine import files
from ringcomm.native import FOLDER
from ringcomm.types import TABLES

__all__ = ["SOURCES", "Compiled", "compiled", "cubin", "options"]

SOURCES = FOLDER / "kernels" / "cuda"


class Compiled(NamedTuple):
    """The result of a compilation."""

    code: bytes  # for the GPU
    ptx: str
    report: str  # of ptxas: registers, spills


def cubin(variant: KernelVariant, architecture: str) -> bytes:
    """Return the machine code of entry.cu for one kernel, dtype and operation."""
    sources, flags = _sources(), options(variant, architecture)
    digest = hashlib.sha256(repr((sources, flags, nvrtc.getVersion())).encode()).hexdigest()
    cached = cache_folder() / "cuda" / f"{digest}.cubin"
    with suppress(OSError):
        return cached.read_bytes()
    code = _compile(sources, flags).code
    with suppress(OSError):  # a full or read-only home: the next process compiles again
        files.write_atomic(cached, code)  # atomically: other ranks write the same file
    return code


def compiled(variant: KernelVariant, architecture: str) -> Compiled:
    """Return machine code, PTX and report, without the cache."""
    return _compile(_sources(), options(variant, architecture))


def options(variant: KernelVariant, architecture: str) -> tuple[str, ...]:
    """Return the options of NVRTC and nvcc. As on the CPU, no multiply-add is contracted and no denormal flushed."""
    numbers = zip(("RC_KERNEL", "RC_DTYPE", "RC_OP"), variant, strict=True)
    defined = [f"-D{name}={number}" for name, number in numbers]
    return ("-std=c++20", "-fmad=false", "--ptxas-options=-v", f"-arch={architecture}", *defined)


def _sources() -> dict[str, str]:
    shared = {f"kernels/{name}": SOURCES.parent / name for name in ("kinds.h", "operations.inc")}
    paths = {path.name: path for path in sorted(SOURCES.glob("*.cu*"))} | shared | {"ringcomm/types.def": TABLES}
    return {name: path.read_text() for name, path in paths.items()}


def _compile(sources: dict[str, str], flags: tuple[str, ...]) -> Compiled:
    headers = {name.encode(): text.encode() for name, text in sources.items() if name != "entry.cu"}
    program = nvrtc.createProgram(sources["entry.cu"], "entry.cu", [*headers.values()], [*headers])
    try:
        nvrtc.compileProgram(program, flags)
        return Compiled(nvrtc.getCUBIN(program), nvrtc.getPTX(program).decode(), nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        error.add_note(nvrtc.getProgramLog(program))
        raise
    finally:
        nvrtc.destroyProgram(program)
