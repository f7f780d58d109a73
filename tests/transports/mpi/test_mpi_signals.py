"""A signal handler that raises wherever CPython checks for signals: every rank raises Aborted, and none hangs."""

import dis
import sys
import time
from contextlib import suppress

import numpy as np
import pytest

import mpi_world
from failures import PROMPT, raised
from ringcomm import Aborted

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

CHECKS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}  # instructions after which CPython checks for signals


class Interruption:
    """Raises KeyboardInterrupt at the n-th check for signals in these files. For sys.settrace."""

    def __init__(self, files, number):
        self.files, self.left = files, number
        self.latest = {}  # frame: its previous instruction

    def __call__(self, frame, event, _):
        if not any(part in frame.f_code.co_filename for part in self.files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            here = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            before, self.latest[frame] = self.latest.get(frame, "RESUME"), here  # no event on entry
            self.left -= before in CHECKS
            if before in CHECKS and self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def exchange(comm, x):
    comm.sendrecv(x, (comm.rank + 1) % comm.size, np.empty_like(x), (comm.rank - 1) % comm.size)


CALLS = {
    "all_reduce": lambda comm, x: comm.all_reduce(x, "max"),
    "waiting for a work": lambda comm, x: comm.all_reduce(x, "max", async_op=True).wait(),
    "sendrecv": exchange,
}


def interrupt(comm, name, files, number):
    """Interrupt rank 0 at a check. Return its begin and whether it was interrupted; on others, when they raised."""
    x, call = np.full(100, comm.rank * 1.0), CALLS[name]
    comm.barrier()
    if comm.rank:
        raised(Aborted, lambda: [call(comm, x) for _ in iter(int, 1)])
        return time.monotonic()
    interruption, begin = Interruption(files, number), time.monotonic()
    with suppress(KeyboardInterrupt):
        try:
            sys.settrace(interruption)
            for _ in range(2):
                call(comm, x)
        finally:
            sys.settrace(None)
    with suppress(Aborted):
        comm.abort("interrupted between two calls")  # if it was in no call
    raised(Aborted, comm.barrier)
    return begin, interruption.left <= 0


def interrupt_at_every_check(layout, name, *files):
    for number in range(1, 10_000):
        (begin, interrupted), *others = mpi_world.run(interrupt, layout, name, files, number)
        assert max(others) - begin < PROMPT, f"at check {number}"
        if not interrupted:
            return
    pytest.fail("the calls never end")


def test_an_interrupt_while_calls_are_driven_leaves_no_rank_waiting():
    interrupt_at_every_check("01", "all_reduce", "/transports/messages/call_queue.py", "/transports/waits.py")


# Up to a minute each.
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", ["01", "0011"])
def test_an_interrupt_anywhere_leaves_no_rank_waiting(layout, name):
    interrupt_at_every_check(layout, name, "/ringcomm/")
