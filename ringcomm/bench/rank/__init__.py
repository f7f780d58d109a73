"""One rank of one library, in the environment of that library. It answers requests of the bench and sleeps in between.

This package imports NumPy and its library, and nothing else of ringcomm, which the environment of a peer does not have.
It runs there under another name, so its imports are relative. `ringcomm.bench.job` starts it. `measure` answers the
requests; `ringcomm`, `mpi`, `gloo` and `nccl` are the libraries.
"""
