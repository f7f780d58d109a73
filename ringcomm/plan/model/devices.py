"""What a layout runs on: the numbers of devices.toml, and of the user's own file beside that of `ringcomm tune`."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

from ringcomm.config import tuning_file
from ringcomm.errors import ArgumentError, refuse, unknown
from ringcomm.machine.files import write_atomic

__all__ = [
    "GIB",
    "Accelerator",
    "Calibration",
    "check_name",
    "device",
    "gib",
    "names",
    "own_devices",
    "ranks_of",
    "save",
]

GIB = 1 << 30
MAY_BE_ZERO = ("reserved", "inside_latency", "between_latency", "overlap", "error", "launch")


@dataclass(frozen=True)
class Calibration:
    """The constants that are fitted to measured runs (`calibrate`): how much of its data sheet a device reaches.

    Attributes:
        gemm: share of `flops` in a matrix product that fills whole waves of tiles
        memory: share of `bandwidth` in elementwise kernels, and in what matrix products read and write
        launch: seconds in which the host launches the forward of a layer
        inside: share of `inside` in collectives
        between: share of `between` in collectives
    """

    gemm: float
    memory: float
    launch: float
    inside: float
    between: float


@dataclass(frozen=True)
class Accelerator:
    """A device, its node and its network. devices.toml explains each number."""

    name: str
    flops: float
    memory: float
    reserved: float
    bandwidth: float
    sms: int
    tile: tuple[int, int]
    node: int
    inside: float
    inside_latency: float
    between: float
    between_latency: float
    element: int
    fused: float
    overlap: float
    asynchronous: bool
    ranks_per_core: float
    basis: str
    calibration: Calibration
    error: float = 0.0
    attention: str = "fused"  # of the program, not of the device: no device in a file has it

    @property
    def dropout(self) -> bool:
        """Whether dropout runs and stores its masks: in Megatron-LM of 2022, from which unfused attention is."""
        return self.attention == "unfused"

    @property
    def available(self) -> float:
        """Bytes of memory for a model."""
        return self.memory - self.reserved


def gib(size: float) -> str:
    """Return bytes in the unit in which GPUs have their memory: 80 GB of a data sheet are 80 GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (GIB >> 10):.2f} MiB"


def names() -> list[str]:
    """Return the names of the built-in devices."""
    return [*_built_in()["device"]]


def device(name: str) -> Accelerator:
    """Return a device.

    Raises:
        ArgumentError: it is unknown, or damaged in the user's own file.
    """
    tables = own_devices() if name not in names() and tuning_file() else _built_in()
    if name not in tables["device"]:
        if ranks := ranks_of(name):
            raise ArgumentError(f"{name} was not measured: ringcomm plan --measure --gpus {ranks}")
        raise unknown("device", name, {**_built_in()["device"], **tables["device"]})
    try:
        table = dict(tables["device"][name])
        while "like" in table:
            table = {**_built_in()["device"][table.pop("like")], **table}
        table |= {each: table[each] * GIB for each in ("memory", "reserved")} | {"tile": tuple(table["tile"])}
        table["calibration"] = Calibration(**_checked(Calibration, tables["calibration"][table["calibration"]]))
        table.pop("attention", None)
        return Accelerator(**_checked(Accelerator, table | {"name": name}))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(f"device {name}: {error}") from None


def ranks_of(name: str) -> str | None:
    """Return for how many ranks of this machine a device was measured; None for other devices."""
    match = re.fullmatch(r"this-(\d+)", name)
    return match and match[1]


def own_devices() -> dict[str, dict[str, Any]]:
    """Return the tables of the user's own file; empty ones if there is none.

    Raises:
        ArgumentError: there is no place for the file, or it is damaged.
    """
    path = _own_file()
    try:
        tables = {"device": {}, "calibration": {}} | (tomllib.loads(path.read_text()) if path.exists() else {})
    except (OSError, ValueError) as error:
        raise _damaged(str(error)) from None
    if not all(isinstance(kind, dict) and all(isinstance(x, dict) for x in kind.values()) for kind in tables.values()):
        raise _damaged("expected tables [device.NAME] and [calibration.NAME] only")
    return tables


def check_name(name: str) -> None:
    """Raise ArgumentError unless `save` can keep a device of the user's under this name."""
    if not re.fullmatch("[A-Za-z0-9_-]+", name):
        raise refuse("save", "a name of letters, digits, - and _", repr(name))
    if name in names() or re.fullmatch("this(-.*)?", name):
        raise refuse("save", f"another name than {', '.join(names())}, this and this-N", name)


def save(accelerator: Accelerator, name: str) -> Path:
    """Add a device to the user's own file, and return the file."""
    path, tables = _own_file(), own_devices()
    table = asdict(accelerator) | {"calibration": name}
    table |= {each: table[each] / GIB for each in ("memory", "reserved")}
    del table["name"], table["attention"]
    tables["device"][name], tables["calibration"][name] = table, asdict(accelerator.calibration)
    lines = []
    for kind, entries in tables.items():
        for entry, values in entries.items():
            lines += [f"[{kind}.{entry}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    write_atomic(path, "\n".join(lines).encode())
    return path


@cache
def _built_in() -> Mapping[str, dict[str, Any]]:
    return tomllib.loads((files("ringcomm.plan.model") / "devices.toml").read_text())


def _own_file() -> Path:
    tuning = tuning_file()
    if tuning is None:
        raise ArgumentError("no file for devices: RINGCOMM_TUNING is empty, or you have no home directory")
    return tuning.with_name("devices.toml")


def _damaged(reason: str) -> ArgumentError:
    return ArgumentError(f"{_own_file()} is damaged ({reason}); mend or delete it")


def _checked(kind: type[Accelerator] | type[Calibration], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass in a table; raise ArgumentError if one is missing or has no fit value."""
    found = {}
    for each in fields(kind):
        value = table.get(each.name, each.default)
        if each.type in (int, float):
            number = type(value) in (int, float) and 0 <= value < inf
            fits, what = number and (value > 0 or each.name in MAY_BE_ZERO), "a positive number"
        elif isinstance(each.type, type):
            fits, what = isinstance(value, each.type), each.type.__name__
        else:  # the tile
            fits, what = [type(size) for size in value] == [int, int] and min(value) > 0, "two positive integers"
        if not fits:
            raise refuse(each.name, what, "nothing" if value is MISSING else repr(value))
        found[each.name] = value
    return found


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return str([*value])
    return str(value).lower()
