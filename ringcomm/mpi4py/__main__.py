"""`python -m mpi4py`: the same as `python -m mpi4py.run`."""

from ringcomm.mpi4py.run import main

if __name__ == "__main__":
    main()
