"""An array that blocks its reader in the middle: for ranks that hang, die or are late inside a call."""

import ctypes
import fcntl
import mmap
import os
import struct
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

# From linux/userfaultfd.h: a thread that touches a missing page blocks until the page is filled.
CALL = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine, -1)
USER_MODE_ONLY = 1
API, REGISTER, ZEROPAGE = 0xC018AA3F, 0xC020AA00, 0xC020AA04
VERSION, MISSING = 0xAA, 1


@contextmanager
def stalling_array(length, begin):
    """Yield `length` float32 zeros, and a context whose exit fills the pages from element `begin` on.

    Until then, a thread that touches those pages blocks, so another thread must exit the context.
    """
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, -(-length * 4 // page) * page)
    x = np.frombuffer(memory, np.float32)[:length]
    x[:begin] = 0
    offset = begin * 4 // page * page
    missing = (x.ctypes.data + offset, len(memory) - offset)
    descriptor = open_userfaultfd()
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        filling = stack.enter_context(ExitStack())
        fcntl.ioctl(descriptor, API, bytearray(struct.pack("QQQ", VERSION, 0, 0)))
        fcntl.ioctl(descriptor, REGISTER, bytearray(struct.pack("QQQQ", *missing, MISSING, 0)))
        filling.callback(fcntl.ioctl, descriptor, ZEROPAGE, bytearray(struct.pack("QQQq", *missing, 0, 0)))
        yield x, filling


def open_userfaultfd():
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(CALL, os.O_CLOEXEC | USER_MODE_ONLY)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "userfaultfd")
    return descriptor


def need_stalling():
    """Skip the test if the kernel or the container forbids userfaultfd."""
    try:
        os.close(open_userfaultfd())
    except OSError as error:
        pytest.skip(f"userfaultfd is not available: {error}")
