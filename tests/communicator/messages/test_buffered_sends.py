"""Small sends do not wait for what their receiver does next: they are buffered, and every wait receives messages."""

import time
from pathlib import Path

import numpy as np
import pytest

import ringcomm
from harness.failures import until

MANY = 20_000  # the rings hold 32
MESSAGE, LIMIT = 4096, 16 << 20


@pytest.mark.parametrize(("count", "length"), [(33, 1), (MANY, 1), (100, 25_000)])
@pytest.mark.ranks(2)
def test_sends_that_nobody_receives_yet_do_not_block_a_collective(comm, count, length):
    """The last case is above the limit of a buffered message: there the barrier of the receiver takes them."""
    if comm.rank == 0:
        for number in range(count):
            comm.send(np.full(length, number, np.int32), 1)
    comm.barrier()
    if comm.rank == 1:
        x = np.empty(length, np.int32)
        for number in range(count):
            comm.recv(x, 0)
            assert (x == number).all(), number


@pytest.mark.ranks(2, fresh=True)
def test_a_closing_rank_leaves_no_message_behind(comm, tmp_path):
    """Rank 1 makes no call until rank 0 has sent everything, and rank 0 closes at once."""
    left, x = tmp_path / "left", np.empty(1, np.int32)
    if comm.rank == 0:
        for number in range(MANY):
            comm.send(np.full_like(x, number), 1)
        left.touch()
        return
    until(left.exists, "the end of rank 0")
    for number in range(MANY):
        comm.recv(x, 0)
        assert x[0] == number


@pytest.mark.ranks(2)
def test_a_wait_takes_the_messages_of_all_communicators(comm):
    """Rank 0 closes a group, and with it waits for rank 1, which waits for rank 0 in another communicator."""
    pair = comm.split(0)
    x = np.zeros(1)
    if comm.rank == 0:
        for _ in range(100):
            pair.send(x, 1)
        pair.close()
    comm.barrier()
    for _ in range(100 * comm.rank):
        pair.recv(x, 0)
    pair.close()
    comm.barrier()


@pytest.mark.ranks(2)
def test_the_timeout_of_a_send_ends_with_its_call(comm):
    x = np.zeros(1)
    if comm.rank == 0:
        for _ in range(100):
            comm.send(x, 1, timeout=0.2)
    time.sleep(0.5)
    for _ in range(100 * comm.rank):
        comm.recv(x, 0)
    comm.barrier()


@pytest.mark.ranks(2)
def test_messages_to_a_rank_that_has_closed_are_dropped(comm):
    pair = comm.split(0)
    if comm.rank == 0:
        for _ in range(100):
            pair.send(np.zeros(1), 1)
    comm.barrier()
    if comm.rank == 1:
        pair.close()
    comm.barrier()
    pair.close()
    comm.barrier()


@pytest.mark.ranks(2)
def test_beyond_the_limit_a_send_waits_for_its_receiver(comm, tmp_path):
    pair, full = comm.split(0), tmp_path / "full"
    sent = []

    def flood():
        while sum(sent) < 2 * LIMIT:
            pair.send(np.zeros(MESSAGE // 4, np.float32), 1, timeout=1)
            sent.append(MESSAGE)

    if comm.rank == 0:
        with pytest.raises(ringcomm.CollectiveTimeout, match=r"send\(float32 x 1024, to 1\)"):
            flood()
        assert 0.8 * LIMIT < sum(sent) <= LIMIT
        full.touch()
    until(full.exists, "a full buffer")  # rank 1 makes no call meanwhile
    comm.barrier()
    pair.close()


def test_the_documented_limits_are_those_of_the_core():
    root = Path(__file__).parents[3]
    source = (root / "bindings/src/p2p/engine.h").read_text()
    assert f"MAX_BUFFERED_MESSAGE = {MESSAGE};" in source
    assert "MAX_BUFFERED = 16 << 20;" in source
    page = " ".join((root / "docs/shm.md").read_text().split())
    assert "up to 4 KiB" in page
    assert "16 MiB per peer" in page
