"""A disturbance of cores, for `ringcomm bench --noise`: the work of other programs.

As a program, `noise.py CORE` disturbs one core until its standard input ends, which the kernel does however we end.
"""

import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

__all__ = ["BURST", "PERIOD", "noise"]

BURST, PERIOD = 0.004, 0.016  # seconds of work in each period


@contextmanager
def noise(cores: Iterable[int]) -> Iterator[None]:
    """Disturb these cores in the block."""
    with ExitStack() as stack:
        pipe = subprocess.PIPE
        for core in cores:
            command = [sys.executable, "-I", "-S", __file__, str(core)]
            # In its own session: Ctrl-C reaches the bench alone. Leaving closes its input, and waits.
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
            stack.enter_context(process)
            assert process.stdout
            process.stdout.read(1)  # it has begun
        yield


def disturb(core: int) -> None:
    """Work for BURST of CPU time at a random moment of each period, until standard input ends."""
    with suppress(PermissionError):  # of a sandbox: the kernel spreads those who work
        os.sched_setaffinity(0, {core})
    moment = random.Random(core)
    os.write(1, b".")
    begin = time.monotonic()
    while not select.select([0], [], [], max(0.0, begin + moment.uniform(0, PERIOD - BURST) - time.monotonic()))[0]:
        end = time.process_time() + BURST
        while time.process_time() < end:
            pass
        begin = max(begin + PERIOD, time.monotonic())


if __name__ == "__main__":
    disturb(int(sys.argv[1]))
