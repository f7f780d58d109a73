"""Where and when figures were taken."""

import datetime
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import ringcomm

__all__ = ["Machine", "available_memory", "cache_bytes"]

USUAL_CACHE = 32 << 20


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int  # that this process may use
    cache: int  # bytes of the last-level cache
    system: str
    python: str
    commit: str | None  # of ringcomm, where it runs from a checkout
    date: str

    @classmethod
    def here(cls) -> "Machine":
        return cls(
            cpu=cpu_name(),
            cores=len(os.sched_getaffinity(0)),
            cache=cache_bytes(),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            commit=commit(),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )


def cpu_name() -> str:
    """Return the model, with family and model number: virtual machines may hide what is behind one name."""
    pairs = (line.partition(":") for line in read("/proc/cpuinfo").partition("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    if "model name" not in facts:
        return platform.machine()
    numbers = f" (family {facts['cpu family']}, model {facts['model']})" if "cpu family" in facts else ""
    return facts["model name"] + numbers


def cache_bytes() -> int:
    """Return the size of the last-level cache."""
    sizes = [read(str(path)).strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=USUAL_CACHE)


def available_memory() -> int:
    """Return the bytes that programs can have without swapping."""
    words = read("/proc/meminfo").split()
    return int(words[words.index("MemAvailable:") + 1]) << 10


def commit() -> str | None:
    folder = Path(ringcomm.__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
