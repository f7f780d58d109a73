"""What a layout runs on: the numbers of devices.toml, and of the user's own file beside that of `ringcomm tune`."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ringcomm.config import tuning_file
from ringcomm.errors import ArgumentError, unknown
from ringcomm.machine.files import write_atomic

__all__ = ["Accelerator", "Calibration", "device", "names", "own_file", "save"]

GIB = 1 << 30


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
    attention: str
    fused: float
    dropout: bool
    overlap: float
    asynchronous: bool
    ranks_per_core: float
    basis: str
    calibration: Calibration

    @property
    def available(self) -> float:
        """Bytes of memory for a model."""
        return self.memory - self.reserved


def names() -> list[str]:
    """Return the names of all devices."""
    return [*_tables()["device"]]


def device(name: str) -> Accelerator:
    """Return a device.

    Raises:
        ArgumentError: it is unknown.
    """
    tables = _tables()
    if name not in tables["device"]:
        if name.startswith("this"):
            raise ArgumentError(f"{name} was not measured: ringcomm plan --measure --gpus {name.partition('-')[2]}")
        raise unknown("device", name, tables["device"])
    facts = dict(tables["device"][name])
    while "like" in facts:
        facts = {**tables["device"][facts.pop("like")], **facts}
    facts |= {name: facts[name] * GIB for name in ("memory", "reserved")} | {"tile": tuple(facts["tile"])}
    facts["calibration"] = Calibration(**tables["calibration"][facts["calibration"]])
    return Accelerator(name, **facts)


def own_file() -> Path:
    """Return the file of the user's own devices."""
    tuning = tuning_file()
    if tuning is None:
        raise ArgumentError("no file for devices: RINGCOMM_TUNING is empty, or you have no home directory")
    return tuning.with_name("devices.toml")


def save(accelerator: Accelerator, name: str) -> Path:
    """Add a device to the user's own file, and return the file."""
    path, tables = own_file(), _load(own_file())
    facts = asdict(accelerator) | {"calibration": name}
    facts |= {each: facts[each] / GIB for each in ("memory", "reserved")}
    del facts["name"]
    tables["device"][name], tables["calibration"][name] = facts, asdict(accelerator.calibration)
    lines = []
    for kind, entries in tables.items():
        for entry, values in entries.items():
            lines += [f"[{kind}.{entry}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    write_atomic(path, "\n".join(lines).encode())
    return path


def _tables() -> dict[str, dict[str, Any]]:
    """Return the built-in tables and the user's."""
    own = _load(own_file()) if tuning_file() else {}
    return {kind: {**entries, **own.get(kind, {})} for kind, entries in _built_in().items()}


@cache
def _built_in() -> Mapping[str, dict[str, Any]]:
    return tomllib.loads((files("ringcomm.plan") / "devices.toml").read_text())


def _load(path: Path) -> dict[str, dict[str, Any]]:
    found = tomllib.loads(path.read_text()) if path.exists() else {}
    return {"device": {}, "calibration": {}, **found}


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return str([*value])
    return str(value).lower()
