"""What `ringcomm tune` has measured: a file of thresholds for each kind of machine, which `Config` reads."""

import json
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

from ringcomm import files
from ringcomm.errors import ArgumentError

__all__ = ["NEVER", "TUNABLE", "cpu", "machine", "read", "write"]

TUNABLE = ("segment_bytes", "small_bytes", "stream_bytes", "direct_bytes")
NEVER = 2**62  # a threshold that no array reaches


def cpu() -> str:
    """Return the model of the processor, with its numbers: virtual machines may hide several behind one name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    if "model name" not in facts:
        return platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"


def machine() -> str:
    """Return the name under which the figures of this machine stand: a home may be shared by several kinds of them."""
    return f"{cpu()}, {os.cpu_count()} cores"


@cache
def read(path: Path) -> dict[str, int]:
    """Return the thresholds for this machine, read once; none if there is no such file, or nothing for it."""
    try:
        found = _machines(path).get(machine(), {}).get("settings", {})
        return {name: int(found[name]) for name in TUNABLE if name in found}
    except (AttributeError, ValueError, TypeError) as error:
        raise ArgumentError(f"{path} cannot be read ({error}); delete it, or write it anew: ringcomm tune") from None


def write(path: Path, settings: dict[str, int], facts: dict[str, Any]) -> None:
    """Set the thresholds of this machine, with what should be remembered of the measurement."""
    try:
        machines = _machines(path)
    except ValueError:  # it is written anew
        machines = {}
    text = json.dumps(machines | {machine(): facts | {"settings": settings}}, indent=1) + "\n"
    files.replace(path, text.encode())


def _machines(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError:
        return {}
