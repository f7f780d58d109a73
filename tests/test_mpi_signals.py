"""A signal handler that raises wherever CPython looks for signals: every rank is told, and nobody waits in vain."""

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

LOOKS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}  # instructions after which CPython looks for signals


class Interruption:
    """Raises KeyboardInterrupt at the look of this number that is made in these files. For sys.settrace."""

    def __init__(self, files, number):
        self.files, self.left = files, number
        self.latest = {}  # the instruction before, of each frame

    def __call__(self, frame, event, _):
        if not any(part in frame.f_code.co_filename for part in self.files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            here = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            before, self.latest[frame] = self.latest.get(frame, "RESUME"), here  # that of the entry is not told
            self.left -= before in LOOKS
            if before in LOOKS and self.left == 0:
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
    """Rank 0 is interrupted at a look. Say whether it was, and on the others how long it took until they were told."""
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
        comm.abort("interrupted between two calls")  # if it was in none
    raised(Aborted, comm.barrier)
    return begin, interruption.left <= 0


def interrupt_at_every_look(layout, name, *files):
    for number in range(1, 10_000):
        (begin, interrupted), *others = mpi_world.run(interrupt, layout, name, files, number)
        assert max(others) - begin < PROMPT, f"at look {number}"
        if not interrupted:
            return
    pytest.fail("there is no end to it")


def test_where_calls_are_driven_and_end_an_interrupted_rank_leaves_nobody_waiting():
    interrupt_at_every_look("01", "all_reduce", "/transports/messages/handles.py", "/transports/waits.py")


# Up to a minute each.
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", ["01", "0011"])
def test_wherever_a_rank_is_interrupted_nobody_waits(layout, name):
    interrupt_at_every_look(layout, name, "/ringcomm/")
