"""More than 2 GiB and more than 2**31 elements in one message."""

import numpy as np
import pytest

import harness
from ringcomm.machine.memory import available, mib

BYTES = 2**31 + 8
BLOCK = 1 << 20
PATTERN = (np.arange(BLOCK) % 251).astype(np.uint8)
NEEDED = 3 * BYTES


def blocks(x):
    """Return a sample of the blocks with the first and the last; 61 is prime, so every place of a chunk occurs."""
    return [(number, x[number * BLOCK :][:BLOCK]) for number in (*range(0, BYTES // BLOCK, 61), BYTES // BLOCK)]


def fill(x, value):
    for number, block in blocks(x):
        np.add(PATTERN[: len(block)], (number + value) % 256, out=block, casting="unsafe")


def assert_filled(x, factor, value):
    expected = np.empty(BLOCK, np.uint8)
    for number, block in blocks(x):
        np.add(PATTERN * np.uint8(factor), (factor * number + value) % 256, out=expected, casting="unsafe")
        assert np.array_equal(block, expected[: len(block)]), f"block {number}"


def large(comm):
    x = np.empty(BYTES, np.uint8)
    x.fill(0)  # so that no call waits for its pages
    fill(x, comm.rank + 1)
    comm.all_reduce(x)
    assert_filled(x, 2, 3)
    if comm.rank == 0:
        fill(x, 7)
        comm.send(x, 1)
        x.fill(0)
    else:
        comm.recv(x, 0)
        assert_filled(x, 1, 7)
    comm.broadcast(x, root=1)
    assert_filled(x, 1, 7)


@pytest.mark.slow
def test_a_message_may_be_longer_than_2_gib():
    if available().bytes < NEEDED:
        pytest.skip(f"needs {mib(NEEDED)} of memory: {available()}")
    harness.run(large, 2)
