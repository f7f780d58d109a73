"""Every kernel on the GPUs of all ranks, for compute-sanitizer: what tests/test_gpu.py shows, without pytest.

ringcomm run -n 2 tests/gpu_kernels.py [--emulated]
"""

import sys
from pathlib import Path

import ringcomm

sys.path.insert(0, str(Path(__file__).parent))  # also with PYTHONSAFEPATH

from test_gpu import LENGTHS, CuPy, Emulated, collectives, symmetric

kind = Emulated if "--emulated" in sys.argv else CuPy
with ringcomm.init(timeout=60) as comm:
    collectives(comm, kind, LENGTHS)
    symmetric(comm, kind, LENGTHS[-1])
    if comm.rank == 0:
        print("every kernel is right")
