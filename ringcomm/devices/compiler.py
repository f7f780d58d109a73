"""Compile the CUDA kernels by NVRTC, each at its first use, into a cache on disk."""

import hashlib
import logging
from contextlib import suppress
from typing import NamedTuple

from cupy_backends.cuda.libs import nvrtc

from ringcomm.config import cache_folder
from ringcomm.devices.contract import KernelVariant
from ringcomm.errors import ArgumentError
from ringcomm.machine import files
from ringcomm.native import FOLDER
from ringcomm.types import TABLES

__all__ = ["SOURCES", "Compiled", "compiled", "cubin", "options"]

log = logging.getLogger("ringcomm")

SOURCES = FOLDER / "kernels" / "cuda"
DIGEST = hashlib.sha256().digest_size  # bytes at the start of a cached file, of those that follow


class Compiled(NamedTuple):
    """The result of a compilation."""

    code: bytes  # for the GPU
    ptx: str
    report: str  # of ptxas: registers, spills


def cubin(variant: KernelVariant | None, architecture: str) -> bytes:
    """Return the machine code of entry.cu for one kernel, dtype and operation; for messages if None."""
    sources, flags = _sources(), options(variant, architecture)
    name = hashlib.sha256(repr((sources, flags, nvrtc.getVersion())).encode()).hexdigest()
    try:
        cached = cache_folder() / "cuda" / f"{name}.cubin"
    except ArgumentError as error:  # not ours alone, or on a full or read-only disk
        log.warning("compiling without a cache: %s", error)
        return _compile(sources, flags).code
    with suppress(OSError):
        data = cached.read_bytes()
        if hashlib.sha256(data[DIGEST:]).digest() == data[:DIGEST]:
            return data[DIGEST:]
        log.warning("%s is damaged: compiling again", cached)
    code = _compile(sources, flags).code
    with suppress(OSError):
        # Atomically: other ranks write the same file.
        files.write_atomic(cached, hashlib.sha256(code).digest() + code)
    return code


def compiled(variant: KernelVariant | None, architecture: str) -> Compiled:
    """Return machine code, PTX and report, without the cache."""
    return _compile(_sources(), options(variant, architecture))


def options(variant: KernelVariant | None, architecture: str) -> tuple[str, ...]:
    """Return the options of NVRTC and nvcc. As on the CPU, no multiply-add is contracted and no denormal flushed."""
    numbers = zip(("RC_KERNEL", "RC_DTYPE", "RC_OP"), variant, strict=True) if variant else [("RC_MESSAGES", 1)]
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
