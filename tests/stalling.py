"""An array that stops whoever reads it in the middle: for ranks that hang, die or are late inside of a call."""

import ctypes
import fcntl
import mmap
import os
import struct
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

# From linux/userfaultfd.h: the kernel lets a thread wait at a missing page until somebody fills it.
CALL = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine, -1)
USER_MODE_ONLY = 1
API, REGISTER, ZEROPAGE = 0xC018AA3F, 0xC020AA00, 0xC020AA04
VERSION, MISSING = 0xAA, 1


@contextmanager
def stalling_array(length, begin):
    """Yield `length` zeros of float32, and a context at whose end the pages from element `begin` on are there.

    Until then, whoever touches those pages waits. So the context must be entered, on another thread.
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
    """Skip the test where the kernel, or a container, does not allow it."""
    try:
        os.close(open_userfaultfd())
    except OSError as error:
        pytest.skip(f"no thread can be stopped at a page: {error}")
