"""Messages between two ranks: matched by source and tag, in order, of any size, with everything else going on."""

import random
import threading

import numpy as np
import pytest

import harness
from reference import assert_same, filled
from ringcomm import ArgumentError, MismatchError

# Bytes: none, one, as much as a letter holds, beside it, at once at most, in some pieces, in many.
LENGTHS = (0, 1, 80, 81, 4096, 131_072, 131_073, 300_001, 2_500_003)
READ = 20_000_003  # … so many that the receiver reads them from the memory of the sender


@pytest.fixture(params=[*harness.WORLDS, "threads with little memory"])
def world(request, monkeypatch):
    """The worlds of the other tests, and one where the rings between ranks hold 1 KiB: every few messages they wrap."""
    if "little" in request.param:
        monkeypatch.setenv("RINGCOMM_ARENA_BYTES", "0")
    return request.param.split()[0]


def message(source, length, salt=0):
    return filled(source, length, "uint8", salt)


def lengths(comm):
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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_messages_of_every_length_go_around_a_ring(size, world):
    harness.run(lengths, size, world=world)


def wrap(comm):
    """Send messages of up to nearly a ring, from every part of it: there must be room for each, sooner or later."""
    draw = random.Random(1)
    for number in range(80):
        length = draw.randrange(100, (1000, 250_000)[number % 2])  # nearly one of 1 KiB, or of 256
        if comm.rank == 0:
            comm.send(message(0, length, number), 1)
        else:
            x = np.empty(length, np.uint8)
            comm.recv(x, 0)
            assert_same(x, message(0, length, number), f"message {number}")


def test_a_message_finds_room_wherever_the_ring_ends(world):
    harness.run(wrap, 2, world=world)


def exchange_much(comm):
    peer = 1 - comm.rank
    y = np.empty(READ, np.uint8)
    for salt in range(2):
        assert comm.sendrecv(message(comm.rank, READ, salt), peer, y, peer) == peer
        assert_same(y, message(peer, READ, salt))


def test_very_long_messages_are_exchanged(world):
    harness.run(exchange_much, 2, world=world)


def both_send_first(comm):
    peer = 1 - comm.rank
    x = message(comm.rank, LENGTHS[-1])
    works = [comm.send(x, peer, tag, async_op=True) for tag in range(3)]
    for tag in (2, 0, 1):  # and they are taken in another order
        y = np.empty_like(x)
        assert comm.recv(y, peer, tag) == peer
        assert_same(y, message(peer, LENGTHS[-1]))
    for work in works:
        work.wait()


def test_two_ranks_that_both_send_much_first_do_not_deadlock(world):
    harness.run(both_send_first, 2, world=world)


def ordered(comm):
    """Every rank sends to every rank, to itself too, short and long mixed; receives come in another order of tags."""
    everybody, tags, numbers = range(comm.size), (0, 7, -(2**40)), range(20)
    sizes = [(3, 140_000)[number % 3 == 2] for number in numbers]
    works = [
        comm.send(message(comm.rank, sizes[number], 100 * peer + number), peer, tag, async_op=True)
        for number in numbers
        for peer in everybody
        for tag in tags
    ]
    for peer in reversed(everybody):
        for tag in reversed(tags):
            for number in numbers:
                x = np.empty(sizes[number], np.uint8)
                assert comm.recv(x, peer, tag) == peer
                assert_same(x, message(peer, sizes[number], 100 * comm.rank + number), f"message {number}, tag {tag}")
    for work in works:
        work.wait()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_messages_keep_their_order_per_peer_and_tag(size, world):
    harness.run(ordered, size, world=world)


def from_anybody(comm):
    """Rank 0 takes from whoever comes; each source keeps its own order."""
    for length in (2, 50_000):
        if comm.rank:
            for number in range(10):
                comm.send(np.full(length, 100 * comm.rank + number), 0, tag=length)
            continue
        seen = {peer: [] for peer in range(1, comm.size)}
        for turn in range(10 * (comm.size - 1)):
            x = np.empty(length, np.int64)
            source = comm.recv(x, tag=length) if turn % 2 else comm.recv(x, tag=length, async_op=True).wait()
            seen[source].append(x[0] - 100 * source)
            assert (x == x[0]).all()
        assert seen == {peer: list(range(10)) for peer in seen}
    comm.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_a_receive_from_anybody_says_who_sent(size, world):
    harness.run(from_anybody, size, world=world)


def receives_first(comm):
    peer = (comm.rank + 1) % comm.size
    arrays = [np.empty(8, np.uint8) for _ in range(6)]
    named = [comm.recv(x, peer, tag, async_op=True) for tag, x in enumerate(arrays[:3])]
    anybody = [comm.recv(x, tag=10 + tag, async_op=True) for tag, x in enumerate(arrays[3:])]
    assert not any(work.done() for work in named + anybody)
    comm.barrier()
    for tag in (12, 2, 11, 1, 10, 0):
        comm.send(message(comm.rank, 8, tag), (comm.rank - 1) % comm.size, tag)
    assert [work.wait() for work in named + anybody] == [peer] * 6
    for tag, x in zip((0, 1, 2, 10, 11, 12), arrays, strict=True):
        assert_same(x, message(peer, 8, tag))


def test_receives_may_be_posted_before_anything_is_sent(world):
    harness.run(receives_first, 3, world=world)


def many_pending(comm):
    peer = 1 - comm.rank
    numbers = range(600)
    sizes = [(16, 5_000)[number % 10 == 0] for number in numbers]
    sends = [comm.send(message(comm.rank, sizes[n], n), peer, n % 7, async_op=True) for n in numbers]
    arrays = [np.empty(sizes[n], np.uint8) for n in numbers]
    recvs = [comm.recv(x, peer, n % 7, async_op=True) for n, x in enumerate(arrays)]
    for work in recvs[::-1] + sends:
        work.wait()
    for n, x in enumerate(arrays):
        assert_same(x, message(peer, sizes[n], n), f"message {n}")


def test_many_messages_may_be_pending(world):
    harness.run(many_pending, 2, world=world)


def misfits(comm):
    """Rank 0 sends what rank 1 does not expect; what follows arrives."""
    for length, other in ((3, 4), (4, 3), (0, 1), (100_000, 100_001), (100_000, 3), (3, 100_000)):
        facts = f"float32 x {length}", f"float32 x {other}"
        if comm.rank == 0:
            if length > 1000:  # the sender of a long message waits until it is received, and learns of it
                with pytest.raises(MismatchError, match=f"rank 1 expects.*float32 x {length}") as caught:
                    comm.send(np.ones(length, np.float32), 1)
                assert caught.value.peer == 1
            else:
                comm.send(np.ones(length, np.float32), 1)
            comm.send(np.arange(5), 1)
        else:
            x = np.zeros(other, np.float32)
            with pytest.raises(MismatchError) as caught:
                comm.recv(x, 0)
            assert (caught.value.got, caught.value.expected, caught.value.peer) == (*facts, 0)
            assert not x.any()
            y = np.empty(5, np.int64)
            comm.recv(y, 0)
            assert_same(y, np.arange(5))
    if comm.rank == 0:
        comm.send(np.ones(2, np.int32), 1)
    else:
        with pytest.raises(MismatchError, match=r"int32 x 2.*float32 x 2"):
            comm.recv(np.zeros(2, np.float32), 0, async_op=True).wait()
    assert_same(comm.all_gather(np.array(comm.rank)), np.arange(2))


def test_a_message_of_another_size_or_dtype_is_a_mismatch_and_no_more(world):
    harness.run(misfits, 2, world=world)


def refused(comm):
    x = np.ones(3)
    for call in (
        lambda: comm.send(x, comm.size),
        lambda: comm.send(x, -1),
        lambda: comm.recv(x, comm.size),
        lambda: comm.sendrecv(x, comm.size, x.copy(), 0),
        lambda: comm.sendrecv(x, 0, x.copy(), -2),
        lambda: comm.recv(x[::2], 0),
        lambda: comm.recv(b"abc", 0),
    ):
        with pytest.raises(ArgumentError, match="expected"):
            call()
    comm.barrier()


def test_a_message_to_nobody_is_refused(world):
    harness.run(refused, 2, world=world)


def beside_collectives(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for turn in range(20):
        length = LENGTHS[turn % len(LENGTHS)] // 2
        x, y, total = message(comm.rank, length, turn), np.empty(length, np.uint8), np.array([comm.rank])
        works = [comm.all_reduce(total, async_op=True), comm.send(x, right, turn, async_op=True)]
        gathered = comm.all_gather(np.array([turn, comm.rank]))
        assert comm.recv(y, left, turn) == left
        for work in works:
            work.wait()
        assert_same(y, message(left, length, turn), f"turn {turn}")
        assert_same(total, np.array([comm.size * (comm.size - 1) // 2]))
        assert_same(gathered, np.array([[turn, rank] for rank in range(comm.size)]))


@pytest.mark.parametrize("size", [2, 3])
def test_messages_run_beside_collectives(size, world):
    harness.run(beside_collectives, size, world=world)


def in_threads(comm):
    """Four threads of each rank, each with its own tag."""
    failures = []

    def talk(tag):
        try:
            peer = 1 - comm.rank
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
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_threads_of_a_rank_send_and_receive_at_once(world):
    harness.run(in_threads, 2, world=world)
