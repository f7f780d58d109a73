"""`python -m ringcomm.torch`: build the extension through which callers in C++ reach the backend (native.py)."""

import argparse
import sys
import time

import torch

from ringcomm.errors import RingcommError
from ringcomm.torch.compat.native import BUILD, PYTHON_BACKENDS, build


def main() -> None:
    about = "Build the extension through which callers in C++ reach the backend; see docs/torch.md, C++ callers."
    argparse.ArgumentParser(prog=BUILD, description=about).parse_args()
    if PYTHON_BACKENDS:
        print(f"torch {torch.__version__} needs no extension")
        return
    begin = time.monotonic()
    try:
        library = build()
    except (RingcommError, OSError) as error:
        sys.exit(f"{BUILD}: {error}")
    print(f"{library}: {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
