"""The network over MPI: an MPI communicator of its own, which the native core drives with the MPI of mpi4py."""

import ctypes
import time
from typing import Any

from ringcomm.algorithms.select import AlgorithmSelector
from ringcomm.native import check, ffi, lib
from ringcomm.transports.deadline import Deadline
from ringcomm.transports.mpi.finalize import abort_at_exit, leaving
from ringcomm.transports.network.transport import Network

__all__ = ["MpiNetwork", "mpi_table"]

# The functions of rc_mpi, by the names of its fields.
FUNCTIONS = {
    "isend": "MPI_Isend",
    "irecv": "MPI_Irecv",
    "test": "MPI_Test",
    "cancel": "MPI_Cancel",
    "improbe": "MPI_Improbe",
    "imrecv": "MPI_Imrecv",
    "get_count": "MPI_Get_count",
    "error_string": "MPI_Error_string",
}
LEAST_TAG_UB = 32767  # of any MPI
PAUSE = 1e-3  # seconds between two looks at the sends in flight
FAILED = 2.0  # seconds for the sends in flight after a failure: a peer may never take them
LINGER = 0.5  # seconds at exit for what the others still send


def mpi_table(comm: Any) -> Any:
    """Return the rc_mpi of a communicator of mpi4py."""
    from mpi4py import MPI

    # A library finds what the libraries that it is linked with define.
    libraries = ctypes.CDLL(MPI.__file__), ctypes.CDLL(None)

    def address(name: str) -> Any:
        function = next(getattr(library, name) for library in libraries if hasattr(library, name))
        return ffi.cast("void *", ctypes.cast(function, ctypes.c_void_p).value)

    comm.Set_errhandler(MPI.ERRORS_RETURN)
    handles = {"comm": comm, "byte": MPI.BYTE}
    return ffi.new(
        "rc_mpi *",
        {
            **{field: address(name) for field, name in FUNCTIONS.items()},
            **{field: MPI._handleof(handle) & (1 << 64) - 1 for field, handle in handles.items()},
            "handle_bytes": MPI._sizeof(MPI.Comm),
            "any_source": MPI.ANY_SOURCE,
            "any_thread": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
            "most_tag": min(int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or LEAST_TAG_UB), (1 << 31) - 1),
        },
    )


class MpiNetwork(Network):
    """The link of this process to the others over `comm`, which is for the network alone."""

    def __init__(self, comm: Any, table: Any, selector: AlgorithmSelector, timeout: float) -> None:
        slot = ffi.new("rc_network **")
        check(lib.rc_network_open_mpi(comm.Get_rank(), comm.Get_size(), table, slot))
        super().__init__(ffi.gc(slot[0], lib.rc_network_free), selector, "mpi")
        self._comm, self._timeout = comm, timeout
        self._state = ffi.new("rc_leaving *")

    def leave(self) -> None:
        """Wait until the other ranks have what this one has sent, or have left too."""
        leaving.append(self)
        if self.free_if_unused():
            return
        deadline = Deadline(FAILED if self._state.failed else self._timeout)
        while self._state.unsent and not deadline.passed():
            time.sleep(PAUSE)
            if self.free_if_unused():
                return

    def free_if_unused(self) -> bool:
        check(lib.rc_network_leave(self.handle, self._state))
        if self._state.unsent or self._state.staying or self._state.stuck:
            return False
        leaving.remove(self)
        ffi.release(self.handle)
        self._comm.Free()
        return True

    def end(self) -> None:
        deadline = Deadline(LINGER)
        while not deadline.passed():
            if self.free_if_unused():
                return
            time.sleep(PAUSE)
        if self._state.unsent or self._state.stuck:
            abort_at_exit(self)
        else:
            ffi.release(self.handle)
