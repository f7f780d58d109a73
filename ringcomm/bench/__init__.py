"""Measure the collectives: `ringcomm bench`, in the vocabulary and the columns of nccl-tests.

The rows of `collectives.COLLECTIVES` say what is run and what must come out, `measure` takes the times, `report` prints
them; `command` puts the three together. Only the public API of ringcomm is used.
"""

from ringcomm.bench.command import add_arguments, run

__all__ = ["add_arguments", "run"]
