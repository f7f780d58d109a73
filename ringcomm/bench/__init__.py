"""Measure the collectives: `ringcomm bench`, in the vocabulary of nccl-tests, side by side with the peers.

`peers` says which libraries there are, `job` starts the ranks of one and talks to them, `rounds` lets the libraries
take turns, `report` prints. The ranks of all of them, ringcomm's too, are the program `rank/`, each in the environment
of its library. Collectives are called through the public API only.
"""

from ringcomm.bench.command import add_arguments, run

__all__ = ["add_arguments", "run"]
