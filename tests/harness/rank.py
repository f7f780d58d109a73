"""The program of a rank that a launcher starts: `python rank.py MODULE ARGUMENT ...` calls `serve` of a module."""

import importlib
import sys
from pathlib import Path


def folders():
    """Return the folders from which tests import: helpers, and test modules of other folders."""
    tests = Path(__file__).parents[1]
    return [str(tests), *sorted({str(path.parent) for path in tests.rglob("test_*.py")})]


if __name__ == "__main__":
    sys.path[:1] = folders()
    importlib.import_module(sys.argv[1]).serve(*sys.argv[2:])
