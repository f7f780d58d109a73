"""What torch asks of a group and of its backend, besides calls. Before torch 2.14 one object is both."""

from collections.abc import Sequence
from datetime import timedelta
from traceback import walk_stack
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringcomm.errors import ArgumentError
from ringcomm.torch.compat.native import BUILD, extension
from ringcomm.torch.timeouts import seconds

__all__ = ["Capabilities", "Options", "has_other_backends"]

c10d: Any = dist.distributed_c10d  # torch's stubs leave out much of what it calls

NAME = "ringcomm"


class Options(Protocol):
    """torch's DistributedBackendOptions."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: Sequence[int]


class BackendOptions(torch._C._distributed_c10d.Backend.Options):
    """Those that torch reads of a group, and copies where it splits one."""

    def __deepcopy__(self, _: Any) -> Any:
        copy: Any = BackendOptions(NAME, self._timeout)
        copy.group_name, copy.global_ranks_in_group = self.group_name, self.global_ranks_in_group
        return copy


class Capabilities:
    """The names, devices and features of a group."""

    supports_splitting = True
    supports_coalescing = supports_shrinking = supports_time_estimate = False
    supports_reconfigure = supports_window = False

    def __init__(self, options: Options) -> None:
        self._store, self._default = options.store, options.timeout
        self._timeout: float | None = None  # None: the communicator's, which is the default
        self._name, self._description = options.group_id, "undefined"
        self._ranks = list(options.global_ranks_in_group)  # in the world; empty for the world itself
        self._begun = 0  # collectives, on this rank

    # --- Names --------------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    # --- Devices and features -----------------------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in _devices()]

    def _get_backend(self, device: torch.device | str) -> "Capabilities":
        kind = torch.device(device).type
        if kind not in _devices():
            raise RuntimeError(f"the backend {NAME} serves {' and '.join(_devices())}, not the device type {kind}")
        return self

    # What torch calls on a group that is bound to a GPU: it connects at its first call, and `split_group` alone splits.
    def eager_connect_single_device(self, device: torch.device) -> None: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has begun."""
        return self._begun

    def _set_sequence_number_for_group(self) -> None:
        """Agree on the number of the first collective, which is always the same."""

    def _wait_for_pending_works(self) -> None:
        """Wait for hooks, of which there are none."""

    def get_group_store(self) -> Any:
        return self._store

    @property
    def options(self) -> Any:
        timeout = self._default if self._timeout is None else timedelta(seconds=self._timeout)
        options: Any = BackendOptions(NAME, timeout)
        options.group_name, options.global_ranks_in_group = self._name, self._ranks
        return options

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls."""
        self._timeout = seconds(timeout)


def has_other_backends() -> bool:
    """Return whether the group is to have another backend for another device.

    Raises ArgumentError where torch would drop the other backend silently: before torch 2.14, without the extension.
    """
    backends = _backends_by_device()
    others = {*backends.values()} - {NAME}
    if others and not extension():
        asked = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        hint = (
            f"before torch 2.14, {NAME} shares a group with another backend only through an extension in C++: "
            f"build it once by {BUILD}, or make a group for each backend"
        )
        raise ArgumentError(f"backend {asked!r}: {hint}", argument="backend", got=asked)
    return bool(others)


def _backends_by_device() -> dict[str, str]:
    """Return the backends of the group that torch makes: a local variable of its function, and no argument of ours."""
    configs = (f.f_locals["backend_config"] for f, _ in walk_stack(None) if "backend_config" in f.f_locals)
    config = next(configs, None)
    return dict(config.get_device_backend_map()) if config else {}


def _devices() -> list[str]:
    """Return the kinds of device for which the backend is registered."""
    kinds: list[str] = c10d.Backend.backend_capability[NAME]
    return kinds
