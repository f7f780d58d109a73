"""`ringcomm doctor`: check what works on this machine, and explain what does not."""

import argparse
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.devices.gpu import Gpu
from ringcomm.errors import RingcommError
from ringcomm.launcher.launch import launch
from ringcomm.machine import memory, topology
from ringcomm.native import ffi, lib
from ringcomm.transports.network.ucx import open_ucx

__all__ = ["add_arguments", "run"]

OLDEST_KERNEL = (5, 4)
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
READ_THE_PARENT = """
import ctypes, os, sys
class Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]
found, size = ctypes.create_string_buffer(64), int(sys.argv[2])
local, remote = Range(ctypes.addressof(found), size), Range(int(sys.argv[1]), size)
read = ctypes.CDLL(None, use_errno=True).process_vm_readv
if read(os.getppid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) != size:
    sys.exit(os.strerror(ctypes.get_errno()))
print(found.raw[:size].hex())
"""
SEND_A_DESCRIPTOR = """
import os, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as peer:
    socket.send_fds(peer, [b"here"], [os.memfd_create("doctor")])
"""


def add_arguments(_: argparse.ArgumentParser) -> None:
    """`ringcomm doctor` has no options."""


def run(_: argparse.Namespace) -> int:
    """Print a line per check: its name, ok or no, and the figure or the reason. Return 0 if ranks can communicate."""
    works = True
    for name, check in CHECKS.items():
        try:
            mark, text = "ok", check()
        except Exception as error:  # the next checks may find the cause
            mark, text = "no", str(error) or repr(error)
            works = works and check is not ranks
        print(f"{name:<12} {mark:<3} {text}", flush=True)
    return 0 if works else 1


def system() -> str:
    release = platform.release()
    found = tuple(int(number) for number in release.split("-")[0].split(".")[:2])
    if sys.platform != "linux" or found < OLDEST_KERNEL:
        raise RingcommError(f"{platform.platform()}; ringcomm needs Linux >= {'.'.join(map(str, OLDEST_KERNEL))}")
    return f"Linux {release}, {platform.machine()}"


def cores() -> str:
    most = sum(not topology.outnumbered([topology.cores()] * ranks) for ranks in range(1, len(topology.cores()) + 1))
    bound = f"ringcomm run gives each of up to {most} ranks its own" if most > 1 else "ringcomm run binds no ranks"
    return f"{topology.describe()}; {bound}"


def headroom() -> str:
    tightest = memory.available()
    shared = "" if tightest is memory.UNKNOWN else f"{memory.mib(tightest.bytes)} can be shared: "
    return shared + tightest.limit


def memfd() -> str:
    fd = os.memfd_create("doctor")
    try:
        os.posix_fallocate(fd, 0, 1 << 20)
    finally:
        os.close(fd)
    return f"not limited by /dev/shm, which has {memory.mib(shutil.disk_usage('/dev/shm').free)} free"


def pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))
    return "the death of a rank is detected at once"


def descriptors() -> str:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", SEND_A_DESCRIPTOR, str(theirs.fileno())]
        subprocess.run(command, pass_fds=[theirs.fileno()], check=True, timeout=30)
        ours.settimeout(30)
        _, fds, _, _ = socket.recv_fds(ours, 16, 1)
        os.close(fds[0])
    return "can be passed between processes (SCM_RIGHTS)"


def cma() -> str:
    """A child reads its parent: Yama refuses that, as it does between ranks, where only descendants may be read."""
    secret = secrets.token_bytes(16)
    address = int(ffi.cast("uintptr_t", ffi.from_buffer(secret)))
    command = [sys.executable, "-c", READ_THE_PARENT, str(address), str(len(secret))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.stdout.strip() == secret.hex():
        return "large blocks are copied directly from the memory of another process (process_vm_readv)"
    scope = f" (kernel.yama.ptrace_scope is {PTRACE_SCOPE.read_text().strip()})" if PTRACE_SCOPE.exists() else ""
    raise RingcommError(f"large blocks are copied twice: {done.stderr.strip() or 'the child read wrong bytes'}{scope}")


def ranks() -> str:
    return all_reduce(_sum, 30)


def all_reduce(program: Callable[[Communicator], float], timeout: float) -> str:
    start = time.perf_counter()
    sums = launch(program, 2, timeout=timeout)
    if sums != [3.0, 3.0]:
        raise RingcommError(f"all_reduce of 1 and 2 returned {sums}")
    return f"all_reduce between 2 processes took {time.perf_counter() - start:.1f} s, including their start"


def _sum(comm: Communicator) -> float:
    x = np.array([comm.rank + 1.0])
    comm.all_reduce(x)
    return float(x[0])


def package(requirement: str, *names: str) -> str:
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    raise RingcommError(f"not installed: pip install {requirement}")


def torch_extension() -> str:
    torch = package("'ringcomm[torch]'", "torch")
    native = import_module("ringcomm.torch.compat.native")
    if native.PYTHON_BACKENDS:
        return f"torch {torch} needs none"
    if native.extension():
        return f"built for torch {torch}"
    lacking = "a second backend in a group, types of errors in futures, the group's memory for DDP's buckets on GPUs"
    raise RingcommError(f"torch {torch} lacks {lacking}, without an extension: {native.BUILD}")


def ucx() -> str:
    try:
        found = open_ucx(Config())
    except RingcommError as error:
        raise RingcommError(f"{error} (only for RDMA between hosts: elsewhere sockets are faster)") from None
    chosen = "" if found.has_rdma else ", no RDMA: hosts are linked by sockets, unless RINGCOMM_LINK=ucx"
    return f"{found.version} ({found.library}): {' '.join(found.transports)}{chosen}"


def cuda() -> str:
    runtime = cupy().cuda.runtime
    if not runtime.driverGetVersion():
        raise RingcommError("no CUDA device: no NVIDIA driver is installed")
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise RingcommError(f"no CUDA device: {error}") from None
    found = []
    for ordinal in range(count):
        facts = runtime.getDeviceProperties(ordinal)
        found.append(f"{ordinal}: {facts['name'].decode()} (sm_{facts['major']}{facts['minor']})")
    driver, own = (f"{n // 1000}.{n % 1000 // 10}" for n in (runtime.driverGetVersion(), runtime.runtimeGetVersion()))
    return f"{', '.join(found)}; the driver supports CUDA {driver}, CuPy uses {own}"


def gpu_pairs() -> str:
    cuda()
    gpus = cupy().cuda
    found: dict[str, list[str]] = {}
    for one, other in combinations(range(gpus.runtime.getDeviceCount()), 2):
        access = gpus.runtime.deviceCanAccessPeer
        words = "peer access" if access(one, other) and access(other, one) else "no peer access"
        found.setdefault(words, []).append(f"{one}-{other}")
    if not found:
        return "one GPU"
    return "; ".join(f"{words}: {' '.join(pairs)}" for words, pairs in found.items()) + " (link: nvidia-smi topo -m)"


def gpu_memory() -> str:
    cuda()
    return describe_sharing(import_module("ringcomm.devices.cuda").device_of(0).gpu)


def describe_sharing(gpu: Gpu) -> str:
    by_descriptor, reason = gpu.sharing()
    how = "file descriptors (cuMemExportToShareableHandle)" if by_descriptor else "cudaIpc"
    return f"shared with other processes by {how}: {reason}"


def gpu_ranks() -> str:
    cuda()
    return all_reduce(_sum_on_gpu, 60)


def _sum_on_gpu(comm: Communicator) -> float:
    gpus = cupy()
    gpus.cuda.Device(comm.rank % gpus.cuda.runtime.getDeviceCount()).use()
    x = gpus.full(1, comm.rank + 1.0)
    comm.all_reduce(x)
    return float(x[0])


def cupy() -> Any:
    try:
        return import_module("cupy")
    except ImportError as error:
        raise RingcommError(f"needs CuPy: {error}") from None


CHECKS: dict[str, Callable[[], str]] = {
    "system": system,
    "python": platform.python_version,
    "ringcomm": lambda: version("ringcomm"),
    "kernels": lambda: str(ffi.string(lib.rc_kernels_name()), "ascii"),
    "cores": cores,
    "memory": headroom,
    "memfd": memfd,
    "pidfd": pidfd,
    "descriptors": descriptors,
    "cma": cma,
    "ranks": ranks,
    "numpy": lambda: version("numpy"),
    "torch": lambda: package("'ringcomm[torch]'", "torch"),
    "torch-c++": torch_extension,
    "mpi4py": lambda: package("'ringcomm[mpi]'", "mpi4py"),
    "ucx": ucx,
    "cupy": lambda: package("'ringcomm[cuda13]' or 'ringcomm[cuda12]'", "cupy-cuda13x", "cupy-cuda12x"),
    "cuda": cuda,
    "gpu-pairs": gpu_pairs,
    "gpu-memory": gpu_memory,
    "gpu-ranks": gpu_ranks,
}
