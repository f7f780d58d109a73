"""Run the programs that the arguments name, one after the other, in one job."""

import runpy
import sys

for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
