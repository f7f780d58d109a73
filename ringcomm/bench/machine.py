"""The machine and the time of a measurement."""

import ctypes
import datetime
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ringcomm
from ringcomm.config import LAUNCHER, tuning_file
from ringcomm.machine import topology, tuning
from ringcomm.native import check, ffi, lib

__all__ = ["Machine", "cache_bytes", "gpus", "line_seconds"]

USUAL_CACHE = 32 << 20


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int  # of the machine: a rank may be bound to some
    cache: int  # bytes of the last-level cache
    gpus: list[str]
    system: str
    python: str
    commit: str | None  # of ringcomm, if it runs from a checkout
    date: str
    settings: dict[str, dict[str, Any]]  # source → name → value, of ringcomm's settings that are not the defaults

    @classmethod
    def here(cls) -> "Machine":
        return cls(
            cpu=tuning.cpu(),
            cores=os.cpu_count() or 1,
            cache=cache_bytes(),
            gpus=gpus(),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            commit=commit(),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            settings=settings(),
        )


def settings() -> dict[str, dict[str, Any]]:
    environment = {
        name: value for name, value in os.environ.items() if name.startswith("RINGCOMM_") and name not in LAUNCHER
    }
    path = tuning_file()
    found: dict[str, dict[str, Any]] = {"environment": environment, f"file {path}": tuning.read(path) if path else {}}
    return {source: values for source, values in found.items() if values}


def cache_bytes() -> int:
    """Return the size of the last-level cache."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=USUAL_CACHE)


def line_seconds() -> float:
    """Return what a cache line takes from one core to another and back; on a virtual machine it changes at times."""
    first, *_, last = [*sorted(topology.cores())] * 2
    ns = ffi.new("double *")
    check(lib.rc_line_latency(first, last, ns))
    return float(ns[0]) * 1e-9


def gpus() -> list[str]:
    """Return the names of the GPUs visible to this process; none without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    number, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number)):
        return []
    found = []
    for ordinal in range(number.value):
        cuda.cuDeviceGetName(name, len(name), ordinal)
        found.append(name.value.decode())
    return found


def commit() -> str | None:
    folder = Path(ringcomm.__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None
