"""Compile kernels into ringcomm's cache, in parallel and the usual ones first, so that no check waits for a compiler.

python benchmarks/gpu/precompile.py [--architecture sm_90] [--most N]
"""

import argparse
import os
import sys
import time
from functools import partial
from multiprocessing import get_context

from ringcomm.bench.rank.collectives import REDUCTIONS
from ringcomm.devices import emulated
from ringcomm.devices.contract import KernelVariant
from ringcomm.native import NULL, ffi
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.calls import CollectiveCall
from ringcomm.transports.cuda.kernels import plan_launch
from ringcomm.types import DTYPES, KERNELS, OPS, REDUCING_KERNELS, reducible

USUAL = ("bfloat16", "float16", "float64", "int64")


def variants() -> list[KernelVariant]:
    """Return the kernels that gpu_check launches: of float32 and moving data, of a few dtypes, of all."""
    found = [(kernel, "float32", op) for kernel in REDUCING_KERNELS for op in ("sum", "max")]
    found += [
        (kernel, dtype, "sum") for kernel in KERNELS if kernel not in REDUCING_KERNELS for dtype in ("uint32", "uint8")
    ]
    found += [(kernel, dtype, "sum") for kernel in REDUCING_KERNELS for dtype in USUAL]
    found += [
        (kernel, dtype, op)
        for kernel in ("ll", "one_shot", "ring_all_reduce")
        for dtype in DTYPES
        for op in REDUCTIONS
        if reducible(dtype, op, True)
    ]
    return [*dict.fromkeys(variant(*each) for each in found)]


def variant(kernel: str, dtype: str, op: str) -> KernelVariant:
    call = CollectiveCall(NULL, NULL, 1, DTYPES[dtype], OPS[op][0])
    shape = ffi.new("rc_cuda_shape *", {"ranks": 2, **emulated.device.shape._asdict()})
    return plan_launch(Blockwise(0, 2, "all_reduce", call), shape, emulated.device.limits(2), kernel).variant


def compile_one(architecture: str, variant: KernelVariant) -> str:
    """Return why it could not be compiled, if so."""
    from ringcomm.devices.compiler import cubin

    try:
        cubin(variant, architecture)
    except Exception as error:  # of any kind: the others are compiled
        return f"{variant}: {type(error).__name__}: {error}"[:300]
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="", help="default: that of the first GPU")
    parser.add_argument("--most", type=int, default=1000, metavar="N", help="compile the first N only")
    options = parser.parse_args()
    if not options.architecture:
        import cupy

        options.architecture = f"sm_{cupy.cuda.Device(0).compute_capability}"
    start, todo, workers = time.monotonic(), variants()[: options.most], max(1, len(os.sched_getaffinity(0)) - 2)
    with get_context("spawn").Pool(workers) as pool:
        failed = [*filter(None, pool.imap_unordered(partial(compile_one, options.architecture), todo))]
    for line in failed:
        print(f"error: {line}")
    print(f"{len(todo)} kernels in {time.monotonic() - start:.1f} s by {workers} processes, {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
