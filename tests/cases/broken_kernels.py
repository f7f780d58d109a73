"""Five ways in which a kernel can be broken: what a launch of virtual ranks leaves in memory is changed afterwards."""

import ctypes

import numpy as np

from ringcomm.bench.kernels.fresh import FreshCheck
from ringcomm.transports.cuda.virtual import VirtualCall

__all__ = ["BROKEN", "break_launches"]

PARTS = 7  # of an output, of which two change places


def nothing(check, launch):
    """Launch no kernel."""


def stale(check, launch):
    """Leave the result of the launch before, as a stale staging buffer would."""
    before = getattr(check, "before", None)
    launch()
    check.before = output(check).copy()
    if before is not None:
        output(check)[:] = before


def short(check, launch):
    """Leave the last element as it was."""
    item = target(check).itemsize
    last = output(check)[-item:].copy()
    launch()
    output(check)[-item:] = last


def swapped(check, launch):
    """Exchange the first two parts of the output, which are blocks of ranks or of the grid."""
    launch()
    size = len(output(check)) // PARTS
    parts = output(check)[: PARTS * size].reshape(PARTS, size)
    parts[:2] = parts[1::-1].copy()


def beyond(check, launch):
    """Write an element behind the output."""
    launch()
    ctypes.memset(target(check).ctypes.data + target(check).nbytes, 0, target(check).itemsize)


BROKEN = (nothing, stale, short, swapped, beyond)


def target(check):
    """Return the output of the root where no other rank has one, else of another: broadcast's root has its input."""
    root = check.case.root
    return check._targets[root if check.case.collective in ("reduce", "gather") else (root + 1) % check.case.size]


def output(check):
    """Return the bytes of an output."""
    return target(check).view(np.uint8).reshape(-1)


def break_launches(monkeypatch, broken):
    """Break each launch of a check, on the emulated device."""
    real_check, real_launch, current = FreshCheck.launch, VirtualCall.launch, []

    def check_launch(check):
        current[:] = [check]
        try:
            real_check(check)
        finally:
            current.clear()  # nothing may keep its memory

    def launch(call, stream):
        def run():
            real_launch(call, stream)
            stream.synchronize()

        broken(current[0], run)

    monkeypatch.setattr(FreshCheck, "launch", check_launch)
    monkeypatch.setattr(VirtualCall, "launch", launch)
