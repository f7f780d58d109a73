"""`ringcomm bench` with a small memcpy beside its results: the pages for 256 MiB take each rank seconds."""

import sys

from ringcomm.bench import comparison
from ringcomm.commands.cli import main

BENCH = [sys.executable, __file__]


def shorten():
    comparison.COPY_BYTES = 1 << 20


if __name__ == "__main__":
    shorten()
    sys.exit(main(["bench", *sys.argv[1:]]))
