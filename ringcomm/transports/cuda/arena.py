"""The arena of a rank on its GPU (kernels/cuda/arena.cuh), and the arguments of kernels that use it."""

import numpy as np
from numpy.typing import NDArray

from ringcomm.devices.contract import Device, Memory
from ringcomm.native import check, ffi, lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.cuda.kernels import LaunchPlan
from ringcomm.transports.cuda.symmetric import NOT_SYMMETRIC, BufferLocation

__all__ = ["MAX_LAUNCHES", "Arena"]

MAX_LAUNCHES = 256  # in flight: the driver's queue is finite, and a thread that waits for it can do nothing else


class Arena:
    """An arena of one of `ranks` ranks."""

    def __init__(self, device: Device, rank: int, ranks: int) -> None:
        self.device, self.rank = device, rank
        self._shape = ffi.new("rc_cuda_shape *", {"ranks": ranks, **device.shape._asdict()})
        size, peers_at = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        check(lib.rc_cuda_layout(self._shape, size, peers_at))
        self.size, self._peers_at = int(size[0]), int(peers_at[0])
        self.memory = device.allocate(self.size, "the arena of a rank")
        self.opened: list[Memory] = []  # the arenas of all ranks
        self._control_memory = device.allocate_pinned(ffi.sizeof("rc_cuda_control"))
        self.control = ffi.cast("rc_cuda_control *", self._control_memory.address)
        memory = ffi.cast("void *", self.memory.address)
        self._call = ffi.new("rc_cuda_call *", {"arena": memory, "control": self.control, "rank": rank})
        self._args_bytes = int(lib.rc_cuda_args_bytes())
        offsets = MAX_LAUNCHES * 2 * (ranks + 1)  # of blocks to send and to receive, for each launch in flight
        self._table_memory = device.allocate_pinned(8 * offsets)
        table = ffi.buffer(ffi.cast("char *", self._table_memory.address), 8 * offsets)
        self._tables = np.frombuffer(table, np.uint64).reshape(MAX_LAUNCHES, 2, ranks + 1)

    def open(self, handles: list[str]) -> None:
        """Open the arenas of all ranks. Raises OSError or RuntimeError, as CuPy does."""
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

    def arguments(
        self,
        call: Blockwise,
        plan: LaunchPlan,
        number: int,
        timeout: float,
        locations: tuple[BufferLocation, BufferLocation] = (NOT_SYMMETRIC, NOT_SYMMETRIC),
    ) -> NDArray[np.uint8]:
        """Return the kernel's arguments. A failure repeats `number`; `locations` are those of source and target."""
        offsets = [0, 0]
        for which, values in enumerate((plan.send_offsets, plan.recv_offsets)):
            if values:
                table = self._tables[number % MAX_LAUNCHES, which]
                table[:] = values
                offsets[which] = table.ctypes.data
        fields = self._call
        fields.input, fields.output = ffi.cast("void *", call.source), ffi.cast("void *", call.target)
        fields.send_offsets, fields.recv_offsets = (ffi.cast("uint64_t *", offset) for offset in offsets)
        fields.input_location, fields.output_location = locations
        fields.number, fields.timeout = number, timeout
        fields.kernel, fields.dtype, fields.op = plan.variant.kernel, call.dtype, plan.variant.op
        fields.count, fields.factor, fields.root = plan.count, call.factor, call.root
        args = np.empty(self._args_bytes, np.uint8)
        check(lib.rc_cuda_args(self._shape, fields, ffi.from_buffer(args)))
        return args
