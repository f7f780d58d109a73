"""Sum an array that lies on the GPU of each rank.

    ringcomm run -n 2 examples/gpu_allreduce.py               rank r takes GPU r, in turn where there are fewer
    ringcomm run -n 2 examples/gpu_allreduce.py --emulated    the same calls, the kernels run on the CPU: slow

A call is queued on the current stream, as a kernel is: the program goes on at once, and what it queues next sees the
sum. The second part does so on a stream of its own.
"""

import argparse
import time
from functools import partial

import numpy as np

import ringcomm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", action="store_true", help="on the emulated device: no GPU is needed")
    parser.add_argument("--calls", type=int, default=10, help="that are timed (default: 10)")
    arguments = parser.parse_args()
    comm = ringcomm.init()

    if arguments.emulated:
        from ringcomm.devices.emulated import Stream, array, device

        current, place, count = device.stream, "the emulated device", 1 << 14
    else:
        import cupy
        from cupy import array
        from cupy.cuda import get_current_stream as current

        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            parser.error(f"there is no GPU to use ({error}); --emulated needs none")
        Stream = partial(cupy.cuda.Stream, non_blocking=True)  # noqa: N806 (it takes the place of the class)
        gpu = cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount())
        gpu.use()
        model = cupy.cuda.runtime.getDeviceProperties(gpu.id)["name"].decode()
        place, count = f"GPU {gpu.id}, {model}", 1 << 26
    print(f"{comm.rank + 1} of {comm.size} on {place}")

    total = comm.size * (comm.size + 1) // 2
    x = array(np.full(count, comm.rank + 1, np.float32))
    comm.all_reduce(x)
    if not (x == total).all():
        raise SystemExit("the sum is wrong")

    # On a stream of its own, so that it runs while the current one does something else.
    y = array(np.full(count, comm.rank + 1, np.float32))
    there = current().record()
    with Stream() as aside:
        aside.wait_event(there)
        work = comm.all_reduce(y, async_op=True)
    x /= total
    work.wait()  # the current stream waits for it, and on a GPU the program does not
    if not (x * y == total).all():
        raise SystemExit("the sum on a second stream is wrong")

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
