"""The program of a rank that a launcher starts: `python rank.py MODULE ARGUMENT ...` calls `serve` of a module.

It imports the modules of tests as pytest does.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:1] = map(str, [tests, *sorted({path.parent for path in tests.rglob("test_*.py")})])
    importlib.import_module(sys.argv[1]).serve(*sys.argv[2:])
