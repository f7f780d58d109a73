"""A thread that the system refuses: the error names it and the limits, and the call can be repeated."""

import ctypes
import errno
import os
import resource
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from harness.failures import check_usable, raised
from ringcomm import RingcommError
from ringcomm.machine.threads import start_thread, starting
from ringcomm.native import check, ffi, lib

LIMITS = "raise the limit on threads and processes (RLIMIT_NPROC, pids.max of the control group) or memory (RLIMIT_AS)"


@contextmanager
def stacks_of(size):
    """Let each thread reserve `size` bytes for its stack; the system refuses the one that does not fit."""
    libc = ctypes.CDLL(None)
    before, huge = ctypes.create_string_buffer(128), ctypes.create_string_buffer(128)  # more than a pthread_attr_t
    libc.pthread_getattr_default_np(before)
    libc.pthread_attr_init(huge)
    libc.pthread_attr_setstacksize(huge, ctypes.c_size_t(size))
    assert libc.pthread_setattr_default_np(huge) == 0
    try:
        yield
    finally:
        libc.pthread_setattr_default_np(before)


def without_threads():
    return stacks_of(1 << 60)


def test_a_thread_of_python_is_named():
    with without_threads(), pytest.raises(RingcommError) as refused:
        start_thread("ringcomm test", print)
    assert str(refused.value) == f"cannot start the thread 'ringcomm test' (can't start new thread): {LIMITS}"
    started = start_thread("ringcomm test", threading.Event().set)
    assert started.daemon
    started.join()


@pytest.mark.parametrize("reason", [errno.EAGAIN, errno.ENOMEM])
def test_a_process_that_cannot_be_forked_is_named(reason):
    with pytest.raises(RingcommError) as refused, starting("rank 1"):
        raise OSError(reason, os.strerror(reason))
    assert str(refused.value) == f"cannot start rank 1 ({os.strerror(reason)}): {LIMITS}"


def test_another_error_at_the_start_of_a_process_is_left_alone():
    with pytest.raises(FileNotFoundError), starting("rank 1"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")


@pytest.mark.ranks(2, world="processes")
def test_a_thread_of_the_core_is_named_and_the_communicator_is_usable(comm):
    group = comm.split(0)
    x, peer = np.ones(100_000), (group.rank + 1) % group.size  # a smaller all_reduce needs no thread
    calls = {
        "ringcomm-coll": lambda: group.all_reduce(x, async_op=True),
        "ringcomm-p2p": lambda: group.recv(x, peer, async_op=True),
    }
    for name, call in calls.items():
        with without_threads():
            error = raised(RingcommError, call)
        assert str(error) == f"cannot start the thread '{name}' (Resource temporarily unavailable): {LIMITS}"
    check_usable(group)
    calls["ringcomm-coll"]().wait()
    assert (x == group.size).all()
    group.close()


@pytest.mark.ranks(1, world="processes")
def test_a_second_thread_that_is_refused_does_not_end_the_process(comm):  # noqa: ARG001
    ns = ffi.new("uint64_t *")

    def measure():
        check(lib.rc_wake_latency(0, 0, ns))

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    with stacks_of(64 << 20):
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (100 << 20), hard))
        try:
            error = raised(RingcommError, measure)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert str(error).startswith("cannot start the thread 'ringcomm-probe' (Resource temporarily unavailable)")
    measure()
