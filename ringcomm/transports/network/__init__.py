"""Ranks on several hosts without MPI: shared memory inside a host, sockets between hosts."""
