"""The public names of mpi4py: those of the module MPI, and those that each class adds to its base."""

import inspect

from mpi4py import MPI

UNSUPPORTED = MPI.Win, MPI.File, MPI.Session


def public(owner):
    return {name for name in dir(owner) if not name.startswith("_")}


if MPI.COMM_WORLD.rank == 0:
    print("MPI:", *sorted(public(MPI)))
    for name, cls in inspect.getmembers(MPI, inspect.isclass):
        if cls.__name__ == name and cls not in UNSUPPORTED and (added := public(cls) - public(cls.__base__)):
            print(f"{name}:", *sorted(added))
