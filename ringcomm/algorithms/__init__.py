"""The collective algorithms: one function each, which the modules of this folder register in ALGORITHMS."""

from ringcomm.algorithms import bruck, chain, dissemination, pairwise, recursive, ring, tree  # noqa: F401 (they register)
from ringcomm.algorithms.schedule import ALGORITHMS, Algorithm, record

__all__ = ["ALGORITHMS", "Algorithm", "record"]
