"""A parameter sweep with a pool: how the chance of a large outbreak of an epidemic depends on two parameters.

    ringcomm run --mpi4py -n 4 -m mpi4py.futures examples/mpi4py_sweep.py
    mpirun -n 4 python -m mpi4py.futures examples/mpi4py_sweep.py

Rank 0 runs this program; the others are the workers of its pool. Each simulation has its own seed, so the result does
not depend on which of them runs it.
"""

import argparse
import itertools
from typing import NamedTuple

import numpy as np
from mpi4py.futures import MPIPoolExecutor

PEOPLE = 400
LARGE = PEOPLE // 10


class Case(NamedTuple):
    """The parameters of a set of simulations."""

    contacts: int  # of an infected person, each day
    infection: float  # the probability that a contact infects
    seed: int


def outbreak(case: Case, random: np.random.Generator) -> int:
    """Return how many people are infected in all, when one is at first; an infected person recovers after a day."""
    susceptible, infected = PEOPLE - 1, 1
    while infected:
        escape = (1 - case.infection / PEOPLE) ** (infected * case.contacts)
        infected = int(random.binomial(susceptible, 1 - escape))
        susceptible -= infected
    return PEOPLE - susceptible


def simulate(case: Case, runs: int) -> float:
    """Return the share of simulations with a large outbreak."""
    random = np.random.default_rng(case.seed)
    return sum(outbreak(case, random) >= LARGE for _ in range(runs)) / runs


def main(runs: int) -> None:
    contacts, infections = (5, 10, 20), (0.05, 0.1, 0.2, 0.4)
    cases = [Case(*pair, seed) for seed, pair in enumerate(itertools.product(contacts, infections))]
    with MPIPoolExecutor() as pool:
        shares = pool.map(simulate, cases, itertools.repeat(runs), chunksize=2)
        for row in contacts:
            print(f"{row:2d} contacts:", *(f"{next(shares):.3f}" for _ in infections))
        last = [pool.submit(simulate, cases[-1]._replace(seed=seed), runs) for seed in range(100, 103)]
        print("again, with other seeds:", *(f"{future.result():.3f}" for future in last))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="simulations of each case")
    main(parser.parse_args().runs)
