"""`ringcomm bench`: measure collectives beside other libraries, with the terms of nccl-tests.

`peers` is the table of libraries, `job` starts the ranks of one and sends them requests, `comparison` measures all of
them in turns, `report` prints. The ranks run the program `rank/`, each in the environment of its library. They call
collectives through the public API only.
"""
