"""The last rank aborts while the others wait for it."""

from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.rank == comm.size - 1:
    comm.Abort(7)
comm.recv(source=comm.size - 1)
