"""Measure what a call on GPU arrays costs the host, on any machine: the driver is the emulated one, and runs no kernel.

    python benchmarks/gpu_host_time.py

Each of two ranks makes calls whose kernels end at once, so the time is that of the path from an array to
cuLaunchKernel: of CuPy's arrays, and of tensors, directly and by torch.distributed less what torch spends with a group
that does nothing. That of messages includes how the two hosts match them. Then eight ranks sleep for some seconds with
a launch in flight: what their watching threads use of a core. It prints the table of docs/performance.md. Needs CuPy
and torch, no GPU.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import cupy
import numpy as np
import torch
import torch.distributed as dist

import ringcomm
from ringcomm.arrays.adapters import ADAPTERS, CODES, CUPY, GPU_ARRAYS, TENSOR
from ringcomm.devices import emulated
from ringcomm.devices.contract import Pointer

ROUNDS, CALLS = 15, 2000
SIZE = 1024  # elements
WATCHED_RANKS, WATCHED_SECONDS = 8, 5.0


c10d: Any = dist.distributed_c10d  # torch's stubs leave out much of what it calls
BLOCKING = c10d.AllreduceOptions()
BLOCKING.asyncOp = False


class DeviceTensor(torch.Tensor):
    """A tensor of the CPU that says it is on the emulated GPU. To ask it costs twice as much as a plain one."""

    is_cuda, is_cpu = True, False
    get_device = staticmethod(lambda: 0)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class ArrayAdapter:
    """Reads CuPy's arrays and these tensors on the general path, which connects the GPUs."""

    def memory(self, x: Any, writable: bool) -> tuple[Any, int, int]:  # noqa: ARG002
        address = x.data.ptr if isinstance(x, cupy.ndarray) else x.data_ptr()
        return Pointer(emulated.device, address), SIZE, CODES[x.dtype]

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        raise NotImplementedError


def arrays() -> tuple[Any, Any]:
    """Return an array of CuPy and a tensor, on the emulated GPU."""
    memory = np.ones(SIZE, np.float32)
    unowned = cupy.cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, 0)
    x = cupy.ndarray(SIZE, np.float32, cupy.cuda.MemoryPointer(unowned, 0))
    return x, torch.ones(SIZE).as_subclass(DeviceTensor)


def prepare() -> None:
    emulated.configure(skip_launches=True)
    emulated.EmulatedDevice.blocking = False
    stream = emulated.device.stream()
    kinds, adapter = GPU_ARRAYS["emulated"], ArrayAdapter()
    kinds[cupy.ndarray] = CUPY, lambda _: stream, None
    kinds[DeviceTensor] = TENSOR, lambda _: stream.ptr, None
    for kind in (cupy.ndarray, DeviceTensor):
        ADAPTERS[kind] = adapter
    CODES.setdefault(torch.float32, CODES[np.dtype("float32")])


def microseconds(call: Callable[[], object]) -> float:
    """Return what a call takes, the median over rounds."""

    def round_of() -> float:
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - begin) / CALLS * 1e6

    round_of()
    return median(round_of() for _ in range(ROUNDS))


def direct(comm: ringcomm.Communicator) -> dict[str, float]:
    prepare()
    x, tensor = arrays()
    comm.all_reduce(x)
    before = sys.getallocatedblocks()
    rows = {"all_reduce of a CuPy array": microseconds(lambda: comm.all_reduce(x))}
    rows["… Python objects that 32,000 calls keep"] = sys.getallocatedblocks() - before
    rows["all_reduce of a tensor"] = microseconds(lambda: comm.all_reduce(tensor))
    rows["all_reduce of a CuPy array, async_op, and wait"] = microseconds(
        lambda: comm.all_reduce(x, async_op=True).wait()
    )
    return rows


def messages(comm: ringcomm.Communicator) -> dict[str, float]:
    """Return the times of messages, which both ranks send and then receive, so neither waits long for the other."""
    prepare()
    other, rows = 1 - comm.rank, {}
    for name, kind in (("a CuPy array", 0), ("a tensor", 1)):
        x, out, y, in_ = (arrays()[kind] for _ in range(4))

        def pair(x: Any = x, out: Any = out) -> None:
            comm.send(x, other)
            comm.recv(out, other)

        def batch(given: Any = ((x, out), (y, in_))) -> None:
            comm._router.coalesce_messages(True)
            works = [comm.send(x, other, async_op=True) for x, _ in given]
            works += [comm.recv(out, other, async_op=True) for _, out in given]
            comm._router.coalesce_messages(False)
            for work in works:
                work.wait()

        rows[f"send and recv of {name}, both"] = microseconds(pair)
        rows[f"2 sends and 2 recvs of {name}, async_op, and wait, all four"] = microseconds(batch)
    return rows


def torch_messages(comm: ringcomm.Communicator, store: str) -> dict[str, float]:
    prepare()
    os.environ.update(MASTER_ADDR="127.0.0.1", RINGCOMM_TUNING="")
    dist.init_process_group("ringcomm", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size)
    group: Any = c10d._get_default_group()
    other = 1 - comm.rank
    tensors = [arrays()[1] for _ in range(4)]
    x, out, y, in_ = tensors

    def pair() -> None:
        dist.send(x, other)
        dist.recv(out, other)

    def batch() -> None:
        calls = [dist.P2POp(dist.isend, each, other) for each in (x, y)]
        calls += [dist.P2POp(dist.irecv, each, other) for each in (out, in_)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    paired, batched = microseconds(pair), microseconds(batch)
    done = group.send([x], other, 0)
    group.recv([out], other, 0).wait()
    done.wait()
    kind = type(group)
    real = kind.send, kind.recv
    kind.send = kind.recv = lambda *_: done
    rows = {
        "dist.send and dist.recv, both": paired,
        "… less torch's own part": paired - microseconds(pair),
        "dist.batch_isend_irecv of 2 sends and 2 recvs, and wait, all four": batched,
        "… less torch's own part ": batched - microseconds(batch),
    }
    kind.send, kind.recv = real
    dist.destroy_process_group()
    return rows


def through_torch() -> dict[str, float]:
    """Return the times of one rank in a group of one: the launches of a rank do not depend on the others."""
    prepare()
    _, tensor = arrays()
    os.environ.update(MASTER_ADDR="127.0.0.1", RINGCOMM_TUNING="")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("ringcomm", init_method=f"file://{folder}/store", rank=0, world_size=1)
        group: Any = c10d._get_default_group()
        group.comm.all_reduce(tensor)
        ours = microseconds(lambda: dist.all_reduce(tensor))
        async_op = microseconds(lambda: dist.all_reduce(tensor, async_op=True).wait())
        done = group.allreduce([tensor], BLOCKING)
        real, type(group).allreduce = type(group).allreduce, lambda *_: done
        torchs = microseconds(lambda: dist.all_reduce(tensor))
        torchs_async = microseconds(lambda: dist.all_reduce(tensor, async_op=True).wait())
        type(group).allreduce = real
        dist.destroy_process_group()
    return {
        "dist.all_reduce": ours,
        "… less torch's own part": ours - torchs,
        "dist.all_reduce, async_op, and wait": async_op,
        "… less torch's own part ": async_op - torchs_async,
    }


def watching(comm: ringcomm.Communicator) -> float:
    """Return the share of a core that the watching thread of this rank uses while a launch does not end."""
    emulated.EmulatedDevice.blocking = False
    x, gate = emulated.array(np.ones(SIZE, np.float32)), threading.Event()
    comm.all_reduce(x)
    emulated.device.stream().synchronize()
    with emulated.Stream() as stream:
        stream.add(gate.wait)
        comm.all_reduce(x)
        time.sleep(0.1)
        before = cpu_seconds("ringcomm GPU")
        time.sleep(WATCHED_SECONDS)
        used = cpu_seconds("ringcomm GPU") - before
        gate.set()
        stream.synchronize()
    return used / WATCHED_SECONDS


def cpu_seconds(name: str) -> float:
    """Return the time that the threads of this name have run."""
    threads = [thread.native_id for thread in threading.enumerate() if thread.name == name]
    return sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0]) for each in threads) / 1e9


def main() -> None:
    print("| host time of a call, 4 KiB of float32 | |")
    print("|---|---|")
    rows = ringcomm.launch(direct, 2, timeout=120)
    for name in rows[0]:
        value = max(row[name] for row in rows)
        print(f"| {name} | {value:.0f} |" if "keep" in name else f"| {name} | {value:.2f} µs |")
    for name, value in through_torch().items():
        print(f"| {name.strip()} | {value:.2f} µs |")
    with tempfile.TemporaryDirectory() as folder:
        results = [ringcomm.launch(messages, 2, timeout=120)]
        results.append(ringcomm.launch(torch_messages, 2, args=(f"{folder}/store",), timeout=120))
    for ranks in results:
        for name in ranks[0]:
            print(f"| {name.strip()} | {max(row[name] for row in ranks):.2f} µs |")
    share = sum(ringcomm.launch(watching, WATCHED_RANKS, timeout=120))
    print(f"| {WATCHED_RANKS} watching threads, a launch in flight | {100 * share:.2f} % of a core |")


if __name__ == "__main__":
    main()
