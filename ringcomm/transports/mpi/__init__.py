"""Ranks that MPI has started, on one host or several: shared memory inside a host, MPI between hosts."""
