"""The results of `ringcomm tune`: a file of thresholds per kind of machine, which `Config` reads."""

import json
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

from ringcomm.errors import ArgumentError, unknown
from ringcomm.machine import files

__all__ = ["NEVER", "TUNABLE", "cpu", "machine_name", "read", "write"]

TUNABLE = ("segment_bytes", "one_shot_bytes", "nontemporal_bytes", "direct_bytes")
NEVER = 2**62  # a threshold that no array reaches


def cpu() -> str:
    """Return the CPU model with family and model numbers: virtual machines may report several CPUs under one name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    if "model name" not in facts:
        return platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"


def machine_name() -> str:
    """Return the key of this kind of machine in the file: machines of several kinds may share a home directory."""
    return f"{cpu()}, {os.cpu_count()} cores"


@cache
def read(path: Path) -> dict[str, int]:
    """Return the thresholds for this machine, read once; none if the file or its entry is missing."""
    try:
        settings = {machine: entry["settings"] for machine, entry in _machines(path).items()}
        found = {name: int(value) for name, value in settings.get(machine_name(), {}).items()}
        for name in found:
            if name not in TUNABLE:
                raise unknown("setting", name, TUNABLE)
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        cure = "delete it, run ringcomm tune again, or set RINGCOMM_TUNING to another file"
        raise ArgumentError(f"{path} cannot be read ({error}); {cure}") from None
    return found


def write(path: Path, settings: dict[str, int], facts: dict[str, Any]) -> None:
    """Store the thresholds of this machine, with `facts` about the measurement."""
    try:
        machines = _machines(path)
    except ValueError:  # corrupt: start a new file
        machines = {}
    text = json.dumps(machines | {machine_name(): facts | {"settings": settings}}, indent=1) + "\n"
    files.write_atomic(path, text.encode())


def _machines(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError:
        return {}
