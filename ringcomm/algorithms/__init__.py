"""The algorithms: one function each, entered into ALGORITHMS by the modules of this folder."""

from ringcomm.algorithms import bruck, chain, dissemination, pairwise, recursive, ring, tree  # noqa: F401 (they enter)
from ringcomm.algorithms.schedule import ALGORITHMS, Algorithm, record

__all__ = ["ALGORITHMS", "Algorithm", "record"]
