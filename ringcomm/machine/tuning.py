"""The results of `ringcomm tune`: a file with the thresholds of each kind of machine, which `Config` reads, with the
latency and bandwidth of each link that `ringcomm tune --network` has measured between two kinds, and with the limits
of the kernels of each kind of GPU.
"""

import json
import os
import platform
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from ringcomm.errors import ArgumentError, integer, refuse, unknown

__all__ = [
    "FLOWS",
    "LINK",
    "MOST_FLOWS",
    "NEVER",
    "TUNABLE",
    "cpu",
    "gpu_limits",
    "gpu_name",
    "link_name",
    "links",
    "machine_name",
    "read",
    "write",
]

LINK = ("link_latency", "link_bandwidth")  # µs, GB/s
MOST_FLOWS = 16
FLOWS = "flows"  # of a link, if more than one connection was faster
TUNABLE = ("segment_bytes", "one_shot_bytes", "direct_bytes", "cma_bytes")
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


def link_name(kinds: tuple[str, str], link: str) -> str:
    """Return the key of the link between machines of two kinds."""
    return f"{' and '.join(sorted(kinds))}, over {link}"


@cache
def read(path: Path) -> dict[str, int]:
    """Return the thresholds for this machine, read once; none if the file or its entry is missing."""
    with _named(path):
        settings: dict[str, int] = _settings(_load(path)).get(machine_name(), {})
        for name, value in settings.items():
            if name not in TUNABLE:
                raise unknown("setting", name, TUNABLE)
            integer(name, value)
    return settings


def gpu_name(gpu: str, ranks: int) -> str:
    """Return the key of so many ranks on GPUs of one kind."""
    return f"{gpu}, {ranks} ranks"


@cache
def gpu_limits(path: Path, gpu: str, known: tuple[str, ...]) -> dict[int, dict[str, int]]:
    """Return the limits of the kernels of a GPU by the number of ranks, read once."""
    found: dict[int, dict[str, int]] = {}
    with _named(path):
        for name, settings in _settings(_load(path)).items():
            ranks = name.removeprefix(f"{gpu}, ").removesuffix(" ranks")
            if not ranks.isdecimal() or name != gpu_name(gpu, int(ranks)):
                continue
            for limit, value in settings.items():
                if limit not in known:
                    raise unknown(f"limit of {name}", limit, known)
                integer(f"{limit} of {name}", value, 0)
            found[int(ranks)] = settings
    return found


@cache
def links(path: Path) -> dict[str, dict[str, float]]:
    """Return the latency, bandwidth and flows of each measured link by its key, read once."""
    with _named(path):
        found = {name: values for name, values in _settings(_load(path)).items() if values.keys() & {*LINK}}
        for name, values in found.items():
            for setting in LINK:
                value = values.get(setting)
                if not isinstance(value, int | float) or not 0 < value < inf:
                    raise refuse(f"{setting} of {name}", "a positive number", repr(value))
            integer(f"{FLOWS} of {name}", values.get(FLOWS, 1), 1, MOST_FLOWS)
    return found


def write(path: Path, settings: dict[str, Any], facts: dict[str, Any], name: str | None = None) -> None:
    """Store the settings of this machine, or of the link or the GPU of that name, with facts of the measurement."""
    from ringcomm.machine import files

    try:
        entries = _load(path)
        _settings(entries)
    except (OSError, ValueError):  # unreadable or corrupt: start a new file
        entries = {}
    text = json.dumps(entries | {name or machine_name(): facts | {"settings": settings}}, indent=1) + "\n"
    files.write_atomic(path, text.encode())
    for reader in (read, gpu_limits, links):
        reader.cache_clear()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file, and what to do, if it cannot be read."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = "set RINGCOMM_TUNING to another file; if ringcomm tune wrote this one, delete it and run that again"
        raise ArgumentError(f"{path} cannot be read ({reason}); {hint}") from None


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


def _settings(entries: Any) -> dict[str, dict[str, Any]]:
    """Return the settings of each entry."""
    if not isinstance(entries, dict):
        raise ValueError(f"expected an object with an entry per machine, got a {type(entries).__name__}")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("settings"), dict):
            raise ValueError(f'expected the "settings" of a machine under {name!r}')
    return {name: entry["settings"] for name, entry in entries.items()}
