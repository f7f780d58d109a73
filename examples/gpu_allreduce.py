"""Sum an array on the GPU of each rank.

    ringcomm run -n 2 examples/gpu_allreduce.py               rank r uses GPU r, modulo their number
    ringcomm run -n 2 examples/gpu_allreduce.py --emulated    the kernels run on the CPU: slow

A call is queued on the current stream like a kernel: the program continues at once, and the work it queues next sees
the sum. The second part uses a stream of its own.
"""

import argparse
import time
from typing import Any

import numpy as np

import ringcomm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", action="store_true", help="use the emulated device: needs no GPU")
    parser.add_argument("--calls", type=int, default=10, help="number of timed calls (default: 10)")
    arguments = parser.parse_args()
    comm = ringcomm.init()

    array: Any
    current: Any
    if arguments.emulated:
        from ringcomm.devices import emulated

        array, current = emulated.array, emulated.device.stream
        place, count = "the emulated device", 1 << 14
    else:
        import cupy

        try:
            gpus = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            parser.error(f"no usable GPU ({error}); --emulated needs none")
        gpu = cupy.cuda.Device(comm.rank % gpus)
        gpu.use()
        array, current = cupy.array, cupy.cuda.get_current_stream
        model = cupy.cuda.runtime.getDeviceProperties(gpu.id)["name"].decode()
        place, count = f"GPU {gpu.id}, {model}", 1 << 26
    print(f"{comm.rank + 1} of {comm.size} on {place}")

    total = comm.size * (comm.size + 1) // 2
    x = array(np.full(count, comm.rank + 1, np.float32))
    comm.all_reduce(x)
    if not (x == total).all():
        raise SystemExit("the sum is wrong")

    # On a stream of the communicator, concurrently with the current one.
    y = array(np.full(count, comm.rank + 1, np.float32))
    work = comm.all_reduce(y, async_op=True)
    x /= total
    work.wait()  # the current stream waits; on a GPU the program does not
    if not (x * y == total).all():
        raise SystemExit("the asynchronous sum is wrong")

    x.fill(0)
    comm.barrier()
    current().synchronize()
    start = time.perf_counter()
    for _ in range(arguments.calls):
        comm.all_reduce(x)
    current().synchronize()
    seconds = (time.perf_counter() - start) / arguments.calls
    busbw = 2 * (comm.size - 1) / comm.size * x.nbytes / seconds
    if comm.rank == 0:
        print(f"all_reduce of {x.nbytes:,} bytes: {seconds * 1e6:,.1f} us, bus bandwidth {busbw / 1e9:.3g} GB/s")


if __name__ == "__main__":
    main()
