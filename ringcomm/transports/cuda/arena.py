"""The memory of a rank for a group of GPUs: its arena (kernels/cuda/arena.cuh), and host memory that kernels access."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.devices.contract import Memory, Shape
from ringcomm.devices.device import Device
from ringcomm.devices.limits import Limits
from ringcomm.native import check, ffi, lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.cuda.kernels import LaunchPlan
from ringcomm.transports.cuda.symmetric import BufferLocation

__all__ = ["Arena"]


class Arena:
    """An arena of one of `ranks` ranks."""

    def __init__(self, device: Device, rank: int, ranks: int, shape: Shape) -> None:
        self.device, self.rank = device, rank
        self.shape = ffi.new("rc_cuda_shape *", {"ranks": ranks, **shape._asdict()})
        size, peers_at = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        check(lib.rc_cuda_layout(self.shape, size, peers_at))
        self.size, self._peers_at = int(size[0]), int(peers_at[0])
        self.memory = device.allocate(self.size, "the arena of a rank")
        self.opened: list[Memory] = []  # the arenas of all ranks
        self._control_memory = device.allocate_pinned(ffi.sizeof("rc_cuda_control"))
        self.control = ffi.cast("rc_cuda_control *", self._control_memory.address)

    def open(self, handles: list[str]) -> None:
        """Open the arenas of all ranks. Raises OSError or RuntimeError, as the driver does."""
        self.join([self.memory if rank == self.rank else self.device.open(each) for rank, each in enumerate(handles)])

    def join(self, arenas: list[Memory]) -> None:
        """Write the addresses of all arenas into this one."""
        self.opened = arenas
        addresses = np.array([memory.address for memory in arenas], np.uint64)
        self.device.write(self.memory, self._peers_at, addresses.tobytes())

    def reset(self) -> None:
        """Clear the arena, while no rank uses any."""
        self.device.clear(self.memory, self.size)
        self.join(self.opened)
        self.control.failed = self.control.abort = 0

    def open_group(self, comm: Any, limits: Limits) -> Any:
        """Return an rc_gpus on this memory, of the ranks that the rc_comm `comm` connects."""
        device = self.device
        tables = device.allocate_pinned(lib.rc_gpus_table_bytes(self.shape.ranks))
        driver, name = ffi.new("char[]", device.library.encode()), ffi.new("char[]", device.name.encode())
        setup = {
            "shape": self.shape[0],
            "limits": limits,
            "arena": ffi.cast("void *", self.memory.address),
            "control": self.control,
            "tables": ffi.cast("uint64_t *", tables.address),
            "context": ffi.cast("void *", device.context),
            "driver": driver,
            "device": name,
            "threads": device.threads,
        }
        slot = ffi.new("rc_gpus **")
        check(lib.rc_gpus_open(comm, [setup], slot))
        kept = tables, self.memory, self._control_memory

        def free(gpus: Any, _: Any = kept) -> None:
            lib.rc_gpus_free(gpus)

        return ffi.gc(slot[0], free)

    def arguments(
        self, call: Blockwise, plan: LaunchPlan, timeout: float, locations: tuple[BufferLocation, BufferLocation]
    ) -> NDArray[np.uint8]:
        """Return the arguments of a kernel without a group, for blocks of equal lengths.

        `locations` are those of source and target.
        """
        fields = {
            "arena": ffi.cast("void *", self.memory.address),
            "control": self.control,
            "input": ffi.cast("void *", call.source),
            "output": ffi.cast("void *", call.target),
            "input_location": locations[0],
            "output_location": locations[1],
            "rank": self.rank,
            "timeout": timeout,
            "kernel": plan.variant.kernel,
            "dtype": call.dtype,
            "op": plan.variant.op,
            "count": plan.count,
            "factor": call.factor,
            "root": call.root,
        }
        args = np.empty(int(lib.rc_cuda_args_bytes()), np.uint8)
        check(lib.rc_cuda_args(self.shape, [fields], ffi.from_buffer(args)))
        return args
