"""The results of `ringcomm tune`: a file of thresholds per kind of machine, which `Config` reads."""

import json
import os
import platform
import stat
from functools import cache
from pathlib import Path
from typing import Any

from ringcomm.errors import ArgumentError, integer, unknown
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
        settings = _settings(_load(path))
        for name, value in settings.items():
            if name not in TUNABLE:
                raise unknown("setting", name, TUNABLE)
            integer(name, value)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        cure = "set RINGCOMM_TUNING to another file; if ringcomm tune wrote this one, delete it and run that again"
        raise ArgumentError(f"{path} cannot be read ({reason}); {cure}") from None
    return settings


def write(path: Path, settings: dict[str, int], facts: dict[str, Any]) -> None:
    """Store the thresholds of this machine, with `facts` about the measurement."""
    try:
        machines = _load(path)
        _settings(machines)
    except (OSError, ValueError):  # unreadable or corrupt: start a new file
        machines = {}
    text = json.dumps(machines | {machine_name(): facts | {"settings": settings}}, indent=1) + "\n"
    files.write_atomic(path, text.encode())


def _load(path: Path) -> Any:
    """Return the content of the file: an entry per machine; none if there is no file to be seen."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError:  # missing, or in a folder of another user
        return {}
    if not regular:  # to read a pipe could take for ever
        raise ValueError("it is no regular file")
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("its content is nested too deeply") from None


def _settings(machines: Any) -> dict[str, int]:
    """Return the settings of this machine."""
    if not isinstance(machines, dict):
        raise ValueError(f"expected an object with an entry per machine, got a {type(machines).__name__}")
    for machine, entry in machines.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("settings"), dict):
            raise ValueError(f'expected the "settings" of a machine under {machine!r}')
    return dict(machines.get(machine_name(), {"settings": {}})["settings"])
