"""Ranks that MPI has started, on one host or several: shared memory inside a host, MPI between hosts."""

from ringcomm.transports.mpi.start import NEEDS_STORE, connect, serves

__all__ = ["NEEDS_STORE", "connect", "serves"]
