"""The memory of a rank on its GPU, where that of the others is mapped here, and launches on both (arena.cuh)."""

import numpy as np
from numpy.typing import NDArray

from ringcomm.devices.contract import Device, Memory
from ringcomm.native import check, ffi, lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.cuda.calls import KERNELS, Plan
from ringcomm.transports.cuda.symmetric import NOWHERE, Place

__all__ = ["MOST", "Arena"]

MOST = 256  # launches that are under way: the driver's queue is finite, and who waits in it can do nothing else


class Arena:
    """An arena of one of `ranks` ranks."""

    def __init__(self, device: Device, rank: int, ranks: int) -> None:
        self.device, self.rank = device, rank
        self._shape = ffi.new("rc_cuda_shape *", {"ranks": ranks, **device.shape._asdict()})
        size, peers_at = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        check(lib.rc_cuda_layout(self._shape, size, peers_at))
        self.size, self._peers_at = int(size[0]), int(peers_at[0])
        self.memory = device.allocate(self.size, "the arena of a rank")
        self.opened: list[Memory] = []  # those of all ranks
        self._control_memory = device.shared_with_host(ffi.sizeof("rc_cuda_control"))
        self.control = ffi.cast("rc_cuda_control *", self._control_memory.address)
        memory = ffi.cast("void *", self.memory.address)
        self._call = ffi.new("rc_cuda_call *", {"arena": memory, "control": self.control, "rank": rank})
        self._args_bytes = int(lib.rc_cuda_args_bytes())
        tables = MOST * 2 * (ranks + 1)  # where blocks begin and end, of each launch under way: to send, to receive
        self._table_memory = device.shared_with_host(8 * tables)
        numbers = ffi.buffer(ffi.cast("char *", self._table_memory.address), 8 * tables)
        self._tables = np.frombuffer(numbers, np.uint64).reshape(MOST, 2, ranks + 1)

    def export(self) -> str:
        """Return what the others need to open it."""
        return self.device.export(self.memory)

    def open(self, exported: list[str]) -> None:
        """Open those of all ranks here, and write down where they are. Raises OSError or RuntimeError, as CuPy does."""
        self.join([self.memory if rank == self.rank else self.device.open(each) for rank, each in enumerate(exported)])

    def join(self, memories: list[Memory]) -> None:
        """Write down where the arenas of all ranks are."""
        self.opened = memories
        self._write_peers()

    def _write_peers(self) -> None:
        addresses = np.array([memory.address for memory in self.opened], np.uint64)
        self.device.write(self.memory, self._peers_at, addresses.tobytes())

    def reset(self) -> None:
        """Make it as new, while nobody uses any."""
        self.device.clear(self.memory, self.size)
        self._write_peers()
        self.control.failed = self.control.abort = 0

    def arguments(
        self,
        call: Blockwise,
        planned: Plan,
        source: int,
        target: int,
        number: int,
        timeout: float,
        places: tuple[Place, Place] = (NOWHERE, NOWHERE),
    ) -> NDArray[np.uint8]:
        """Return what the kernel takes that was planned for a call; `number` is told again if it fails. `places`: of
        source and target.
        """
        offsets = [0, 0]
        for which, rows in enumerate((planned.send_rows, planned.recv_rows)):
            if rows:
                table = self._tables[number % MOST, which]
                table[:] = rows
                offsets[which] = table.ctypes.data
        facts = self._call
        facts.input, facts.output = ffi.cast("void *", source), ffi.cast("void *", target)
        facts.send_offsets, facts.recv_offsets = (ffi.cast("uint64_t *", offset) for offset in offsets)
        facts.input_place, facts.output_place = places
        facts.number, facts.timeout = number, timeout
        facts.kernel, facts.dtype, facts.op = KERNELS[planned.kernel], call.dtype, planned.op
        facts.count, facts.factor, facts.root = planned.count, call.factor, call.root
        args = np.empty(self._args_bytes, np.uint8)
        check(lib.rc_cuda_args(self._shape, facts, ffi.from_buffer(args)))
        return args
