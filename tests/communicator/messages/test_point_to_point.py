"""Messages between two ranks: matched by source and tag, in order, of any size."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import harness
from cases.between_hosts import run_on
from cases.reference import assert_same, filled
from harness.failures import check_usable
from ringcomm import MismatchError

# Bytes: 0, 1, the most inline in a packet, one more, a page, the most sent eagerly, one more, some chunks, many.
LENGTHS = (0, 1, 80, 81, 4096, 131_072, 131_073, 300_001, 2_500_003)
READ = 20_000_003  # bytes: the receiver reads them from the sender's memory


@pytest.fixture(params=[*harness.WORLDS, "threads with little memory"])
def world(request, monkeypatch):
    """The worlds of the other tests, and one where the rings between ranks hold 1 KiB: every few messages they wrap."""
    if "little" in request.param:
        monkeypatch.setenv("RINGCOMM_ARENA_BYTES", "1")
    return request.param.split()[0]


def message(source, length, salt=0):
    return filled(source, length, "uint8", salt)


@pytest.mark.ranks(1, 2, 3, 4)
def test_messages_of_every_length_go_around_a_ring(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for salt, length in enumerate(LENGTHS):
        work = comm.send(message(comm.rank, length, salt), right, async_op=True)
        x = np.empty(length, np.uint8)
        assert comm.recv(x, left) == left
        assert work.wait() is None
        assert_same(x, message(left, length, salt), f"{length} bytes")
        x.fill(0)
        assert comm.sendrecv(message(comm.rank, length, salt), right, x, left, tag=1) == left
        assert_same(x, message(left, length, salt), f"{length} bytes by sendrecv")
        x.fill(0)
        work = comm.sendrecv(message(comm.rank, length, salt), right, x, None, async_op=True)
        assert work.wait() == work.result == left
        assert_same(x, message(left, length, salt), f"{length} bytes by sendrecv in the background")


@pytest.mark.ranks(2)
def test_a_message_fits_at_every_position_of_the_ring(comm):
    """Send messages of up to nearly a ring, from every position in it."""
    draw = random.Random(1)
    for number in range(80):
        length = draw.randrange(100, (1000, 250_000)[number % 2])  # nearly one of 1 KiB, or of 256
        if comm.rank == 0:
            comm.send(message(0, length, number), 1)
        else:
            x = np.empty(length, np.uint8)
            comm.recv(x, 0)
            assert_same(x, message(0, length, number), f"message {number}")


@pytest.mark.ranks(2)
def test_very_long_messages_are_exchanged(comm):
    peer = 1 - comm.rank
    y = np.empty(READ, np.uint8)
    for salt in range(2):
        assert comm.sendrecv(message(comm.rank, READ, salt), peer, y, peer) == peer
        assert_same(y, message(peer, READ, salt))


@pytest.mark.ranks(1, 2, 4)
def test_messages_keep_their_order_per_peer_and_tag(comm):
    """Every rank sends short and long messages to every rank and receives them in another order of tags."""
    ranks, tags, numbers = range(comm.size), (0, 7, -(2**40)), range(20)
    sizes = [(3, 140_000)[number % 3 == 2] for number in numbers]
    works = [
        comm.send(message(comm.rank, sizes[number], 100 * peer + number), peer, tag, async_op=True)
        for number in numbers
        for peer in ranks
        for tag in tags
    ]
    for peer in reversed(ranks):
        for tag in reversed(tags):
            for number in numbers:
                x = np.empty(sizes[number], np.uint8)
                assert comm.recv(x, peer, tag) == peer
                assert_same(x, message(peer, sizes[number], 100 * comm.rank + number), f"message {number}, tag {tag}")
    for work in works:
        work.wait()


@pytest.mark.ranks(3)
def test_receives_may_be_posted_before_anything_is_sent(comm):
    peer = (comm.rank + 1) % comm.size
    arrays = [np.empty(8, np.uint8) for _ in range(6)]
    named = [comm.recv(x, peer, tag, async_op=True) for tag, x in enumerate(arrays[:3])]
    unnamed = [comm.recv(x, tag=10 + tag, async_op=True) for tag, x in enumerate(arrays[3:])]
    assert not any(work.done() for work in named + unnamed)
    comm.barrier()
    for tag in (12, 2, 11, 1, 10, 0):
        comm.send(message(comm.rank, 8, tag), (comm.rank - 1) % comm.size, tag)
    assert [work.wait() for work in named + unnamed] == [peer] * 6
    for tag, x in zip((0, 1, 2, 10, 11, 12), arrays, strict=True):
        assert_same(x, message(peer, 8, tag))


@pytest.mark.ranks(2)
def test_many_messages_may_be_pending(comm):
    """600 sends and receives are open at once; the receives are waited for in reverse."""
    peer = 1 - comm.rank
    sizes = [(16, 5_000)[number % 10 == 0] for number in range(600)]
    sends = [comm.send(message(comm.rank, size, n), peer, n % 7, async_op=True) for n, size in enumerate(sizes)]
    arrays = [np.empty(size, np.uint8) for size in sizes]
    recvs = [comm.recv(x, peer, n % 7, async_op=True) for n, x in enumerate(arrays)]
    for work in recvs[::-1] + sends:
        work.wait()
    for n, x in enumerate(arrays):
        assert_same(x, message(peer, sizes[n], n), f"message {n}")


@pytest.mark.ranks(3)
def test_messages_run_beside_collectives(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for turn, length in enumerate(2 * LENGTHS):
        x, y, total = message(comm.rank, length, turn), np.empty(length, np.uint8), np.array([comm.rank])
        works = [comm.all_reduce(total, async_op=True), comm.send(x, right, turn, async_op=True)]
        gathered = comm.all_gather(np.array([turn, comm.rank]))
        assert comm.recv(y, left, turn) == left
        for work in works:
            work.wait()
        assert_same(y, message(left, length, turn), f"turn {turn}")
        assert_same(total, np.array([comm.size * (comm.size - 1) // 2]))
        assert_same(gathered, np.array([[turn, rank] for rank in range(comm.size)]))


@pytest.mark.ranks(2)
def test_threads_of_a_rank_send_and_receive_concurrently(comm):
    """Four threads of each rank, each with its own tag."""
    peer = 1 - comm.rank

    def talk(tag):
        for turn in range(30):
            length = (5, 9_000, 120_000)[turn % 3]
            x, y = message(comm.rank, length, 1000 * tag + turn), np.empty(length, np.uint8)
            if tag % 2:
                comm.sendrecv(x, peer, y, peer, tag)
            else:
                work = comm.send(x, peer, tag, async_op=True)
                comm.recv(y, peer, tag)
                work.wait()
            assert_same(y, message(peer, length, 1000 * tag + turn), f"tag {tag}, turn {turn}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(talk, range(4)))


def shorter(comm):
    """A receive of at most its array takes shorter messages of its dtype, and leaves what does not arrive."""
    peer = 1 - comm.rank
    for length in (0, 3, 5000, READ // 16, READ // 4):
        sent = filled(comm.rank, length, "int32")
        for async_op in (False, True):
            x = np.full(length + 2, -1, np.int32)
            work = comm.send(sent, peer, tag=1, async_op=True)
            received = comm.recv(x, peer, tag=1, at_most=True, async_op=async_op)
            assert (received.wait() if async_op else received) == peer
            work.wait()
            assert_same(x, np.concatenate([filled(peer, length, "int32"), np.full(2, -1, np.int32)]))
    comm.send(np.ones(3, np.int32), peer, async_op=True)
    with pytest.raises(MismatchError, match=r"int32 x 3, but recv\(int32 x 2"):
        comm.recv(np.zeros(2, np.int32), peer, at_most=True)
    comm.send(np.ones(3, np.int32), peer, async_op=True)
    with pytest.raises(MismatchError, match="float32 x 4"):
        comm.recv(np.zeros(4, np.float32), peer, at_most=True)
    check_usable(comm)


def test_a_receive_of_at_most_its_array_takes_shorter_messages(world):
    harness.run(shorter, 2, world=world)


def test_a_receive_of_at_most_its_array_takes_shorter_messages_between_hosts():
    run_on("01", shorter)
