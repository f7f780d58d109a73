"""One rank of one library, in an environment of its own: it does what the bench asks for, and sleeps in between.

This package imports NumPy and the library that is measured, nothing else of ringcomm: the environment of a peer has no
ringcomm. It runs there under another name, so its imports are relative. `ringcomm.bench.job` starts it; `measure` has
the requests that it answers, each of `ours`, `mpi`, `gloo` and `nccl` a library, `host` and `cuda` their buffers.
"""
