"""Transports move bytes between ranks. `contract` defines one; `shm` and `mpi` implement it, as does `messages` on a
link; `routing` passes arrays on GPUs to `cuda`.
"""
