"""The folder that `ringcomm run --mpi4py` puts first on PYTHONPATH: the `mpi4py` in it is ringcomm.mpi4py."""
