"""Every kernel on the GPUs of all ranks, for gpu_check: part of test_gpu.py without pytest.

ringcomm run -n 2 tests/cuda/gpu_kernels.py [--emulated]
"""

import sys
from pathlib import Path

import ringcomm

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # also with PYTHONSAFEPATH

from test_gpu import LENGTHS, CuPy, Emulated, collectives, symmetric  # noqa: E402

kind = Emulated if "--emulated" in sys.argv else CuPy
with ringcomm.init(timeout=60) as comm:
    collectives(comm, kind, LENGTHS)
    symmetric(comm, kind, LENGTHS[-1])
    if comm.rank == 0:
        print("every kernel is right")
