"""Shared by the tests of arrays on devices."""

import threading
from pathlib import Path

import numpy as np

from cases import Arrays
from ringcomm.devices import emulated


class OnDevice(Arrays):
    """Makes the arrays of a call on the emulated device."""

    def memory(self, size):
        return emulated.empty(size, np.uint8)


class Gate:
    """Holds what is queued on streams of the emulated device until it is open."""

    def __init__(self):
        self._opened = threading.Event()
        self.open, self.opened = self._opened.set, self._opened.is_set

    def hold(self, stream):
        stream.add(self._opened.wait)


def behind_a_gate(comm):
    """Launch a call that waits until the gate is open; return the work and the gate."""
    comm.all_reduce(emulated.array(np.ones(1)))  # connects the GPUs
    gate = Gate()
    with emulated.Stream() as stream:
        gate.hold(stream)
        return comm.all_reduce(emulated.array(np.ones(5)), async_op=True), gate


def mappings():
    """Return how many arenas and buffers of emulated devices this process has mapped."""
    return Path("/proc/self/maps").read_text().count("ringcomm emulated device")
