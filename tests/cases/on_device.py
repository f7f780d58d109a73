"""Shared by the tests of arrays on devices."""

import threading
from pathlib import Path

import numpy as np

from cases.collectives import Arrays
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


def synchronize():
    emulated.device.stream().synchronize()


def connected(comm):
    """Connect the GPUs, and load a kernel of every collective. Arrays live until the launches have ended."""
    x, rows = emulated.array(np.ones(1)), emulated.array(np.ones(comm.size))
    results = [
        collective(x) for collective in (comm.all_reduce, comm.broadcast, comm.reduce, comm.all_gather, comm.gather)
    ]
    results += [collective(rows) for collective in (comm.reduce_scatter, comm.all_to_all)]
    results.append(comm.scatter(rows if comm.rank == 0 else None, x))
    synchronize()
