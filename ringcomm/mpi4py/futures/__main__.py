"""`python -m mpi4py.futures`: rank 0 runs a program, the other ranks are the workers of its MPIPoolExecutor."""

import sys

from ringcomm.mpi4py.futures.pool import shared
from ringcomm.mpi4py.run import aborting, run_command_line

USAGE = "usage: python -m mpi4py.futures (script.py | -m module | -c code | -) [argument ...]"


def main() -> None:
    """Run the program that the command line names."""
    if sys.argv[1:] in ([], ["-h"], ["--help"], ["-m"], ["-c"]):
        sys.exit(USAGE)
    with shared() as is_root, aborting():
        if is_root:
            run_command_line()


if __name__ == "__main__":
    main()
