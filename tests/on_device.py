"""Shared by the tests of arrays on devices."""

from pathlib import Path

import numpy as np

from ringcomm.devices import emulated


def behind_a_gate(comm):
    """Launch a call that waits until the gate is open; return the work and the gate."""
    comm.all_reduce(emulated.array(np.ones(1)))  # connects the GPUs
    gate = emulated.EmulatedEvent()
    with emulated.Stream() as stream:
        stream.wait_event(gate)
        return comm.all_reduce(emulated.array(np.ones(5)), async_op=True), gate


def mappings():
    """Return how many arenas and buffers of emulated devices this process has mapped."""
    return Path("/proc/self/maps").read_text().count("ringcomm emulated device")
