"""The CUDA kernels are compiled where they run, each when it is first called, and kept."""

import hashlib
from contextlib import suppress
from typing import NamedTuple

from cupy_backends.cuda.libs import nvrtc

from ringcomm import files
from ringcomm.config import cache_folder
from ringcomm.native import FOLDER

__all__ = ["SOURCES", "Compiled", "compiled", "cubin", "options"]

SOURCES = FOLDER / "kernels" / "cuda"


class Compiled(NamedTuple):
    """What a compilation gives."""

    code: bytes  # for the GPU
    ptx: str
    report: str  # of ptxas: registers, spills


def cubin(kernel: int, dtype: int, op: int, architecture: str) -> bytes:
    """Return the machine code of entry.cu for one kernel, dtype and operation."""
    sources, words = _sources(), options(kernel, dtype, op, architecture)
    digest = hashlib.sha256(repr((sources, words, nvrtc.getVersion())).encode()).hexdigest()
    kept = cache_folder() / "cuda" / f"{digest}.cubin"
    with suppress(OSError):
        return kept.read_bytes()
    code = _compile(sources, words).code
    with suppress(OSError):  # a home that is full, or read only: it is compiled again the next time
        files.replace(kept, code)  # other ranks, which may be threads, do the same
    return code


def compiled(kernel: int, dtype: int, op: int, architecture: str) -> Compiled:
    """Return all that a compilation gives, for those who look at it."""
    return _compile(_sources(), options(kernel, dtype, op, architecture))


def options(kernel: int, dtype: int, op: int, architecture: str) -> tuple[str, ...]:
    """Return what NVRTC and nvcc are told. As on the CPU, no multiply-add is contracted and no denormal flushed."""
    numbers = {"RC_KERNEL": kernel, "RC_DTYPE": dtype, "RC_OP": op}
    defined = [f"-D{name}={number}" for name, number in numbers.items()]
    return ("-std=c++20", "-fmad=false", "--ptxas-options=-v", f"-arch={architecture}", *defined)


def _sources() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(SOURCES.glob("*.cu*"))}


def _compile(sources: dict[str, str], words: tuple[str, ...]) -> Compiled:
    headers = {name.encode(): text.encode() for name, text in sources.items() if name != "entry.cu"}
    program = nvrtc.createProgram(sources["entry.cu"], "entry.cu", [*headers.values()], [*headers])
    try:
        nvrtc.compileProgram(program, words)
        return Compiled(nvrtc.getCUBIN(program), nvrtc.getPTX(program).decode(), nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        error.add_note(nvrtc.getProgramLog(program))
        raise
    finally:
        nvrtc.destroyProgram(program)
