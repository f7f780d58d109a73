"""Run a command under NVIDIA's MPS, in a folder of its own: python benchmarks/gpu/under_mps.py COMMAND …"""

import os
import subprocess
import sys

from ringcomm import RingcommError
from ringcomm.bench.mps import started_mps

if __name__ == "__main__":
    try:
        with started_mps() as clients:
            sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, **clients}).returncode)
    except RingcommError as error:
        sys.exit(str(error))
