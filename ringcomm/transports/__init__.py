"""How bytes get from one rank to another. `contract` is what a transport promises; `shm`, `messages` (with a wire) and
`mpi` keep it, `routing` sends arrays on GPUs to `cuda`.
"""
