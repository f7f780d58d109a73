"""Transports move bytes between the ranks of a group. `contract` defines one, `calls` what it carries out;
`shm` implements it for one machine, `network` for several over sockets or UCX, `mpi` for several over MPI. `routing`
hands arrays on GPUs to `cuda`, or to `staged`, through host memory.

`messages` and `requests` are point-to-point as MPI matches it, on any of them.
"""
