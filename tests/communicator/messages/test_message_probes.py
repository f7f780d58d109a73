"""Probes, messages that are taken by them, and receives that are canceled."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_messages import EITHER, check_received, message, room

from cases.between_hosts import everywhere
from harness.failures import check_usable, raised, until_waiting
from ringcomm import ArgumentError, MismatchError
from ringcomm.transports.messages import ANY_SOURCE, ANY_TAG, Envelope

# --- Probes -----------------------------------------------------------------------------------------------------------


@EITHER
@everywhere
def test_a_probe_leaves_the_message_to_a_receive(comm, length):
    """A probe finds what a receive would get, also before it comes; the message stays until it is received."""
    messages = comm.messages
    if comm.rank == 0:
        until_waiting(comm, 1)
        works = [messages.isend(message(0, length, tag), 1, tag) for tag in (1, 2)]
        for work in works:
            work.wait()
        comm.barrier()
        return
    x = room(length)
    assert messages.probe(ANY_SOURCE, 2) == messages.probe(0, 2) == Envelope(0, 2, length)
    assert messages.iprobe(ANY_SOURCE, ANY_TAG) == messages.iprobe(0, 1) == Envelope(0, 1, length)
    assert messages.iprobe(0, 3) is messages.iprobe(1, ANY_TAG) is messages.itake(0, 3) is None
    check_received(x, messages.recv(x, ANY_SOURCE, ANY_TAG), 0, 1, length, 1)
    x.fill(0xEE)
    check_received(x, messages.recv(x, ANY_SOURCE, ANY_TAG), 0, 2, length, 2)
    assert messages.iprobe(ANY_SOURCE, ANY_TAG) is None
    comm.barrier()


@EITHER
@everywhere
def test_a_taken_message_is_received_by_its_taker_alone(comm, length):
    """Messages that are taken are received in any order, also after others; nobody else gets them."""
    messages = comm.messages
    if comm.rank == 0:
        until_waiting(comm, 1)
        works = [messages.isend(message(0, length, number), 1, 5) for number in range(4)]
        for work in works:
            work.wait()
        return
    x = room(length)
    taken = [messages.take(ANY_SOURCE, ANY_TAG) for _ in range(3)]
    assert {each.envelope for each in taken} == {Envelope(0, 5, length)}
    for number, receive in (
        (3, lambda: messages.recv(x, 0, 5)),
        (1, lambda: taken[1].recv(x)),
        (2, lambda: taken[2].irecv(x).wait()),
    ):
        check_received(x, receive(), 0, 5, length, number)
        x.fill(0xEE)
    assert "received once" in str(raised(ArgumentError, lambda: taken[1].recv(x)))
    assert "received once" in str(raised(ArgumentError, lambda: taken[1].irecv(x)))
    raised(MismatchError, lambda: taken[0].recv(x[:2]))
    assert "received once" in str(raised(ArgumentError, lambda: taken[0].recv(x)))


@pytest.mark.ranks(2)
def test_a_probe_sees_only_what_no_posted_receive_gets(comm):
    """A receive that was posted before a probe gets the message, and the probe the next."""
    messages = comm.messages
    if comm.rank == 0:
        until_waiting(comm, 1)
        for number in range(3):
            messages.send(message(0, 4, number), 1, number)
    else:
        x, y = room(4), room(4)
        first = messages.irecv(x, ANY_SOURCE, ANY_TAG)
        assert messages.probe(ANY_SOURCE, ANY_TAG).tag == 1
        assert messages.take(ANY_SOURCE, ANY_TAG).recv(y).tag == 1
        check_received(x, first.wait(), 0, 0, 4)
        assert messages.recv(x, ANY_SOURCE, ANY_TAG).tag == 2
    comm.barrier()


@pytest.mark.ranks(2)
def test_threads_of_a_rank_probe_and_receive_concurrently(comm):
    """Four threads of each rank probe, take and receive, each with its own tag."""
    messages, peer = comm.messages, 1 - comm.rank

    def talk(tag):
        for turn in range(30):
            length = (5, 9_000, 120_000)[turn % 3]
            send = messages.isend(message(comm.rank, length, turn), peer, tag, turn % 2 == 0)
            x = room(length)
            if tag % 2:
                envelope = messages.take(ANY_SOURCE, tag).recv(x)
            else:
                envelope = messages.recv(x, *messages.probe(ANY_SOURCE, tag)[:2])
            check_received(x, envelope, peer, tag, length, turn)
            send.wait()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(talk, range(4)))


# --- Cancel -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_receive_without_a_message_can_be_cancelled(comm):
    """A receive that no message has matched is withdrawn, and the message goes to the next receive."""
    messages, x, y = comm.messages, room(3), room(3)
    if comm.rank == 1:
        work, other = messages.irecv(x, 0, ANY_TAG), messages.irecv(y, 0, 1)
        assert work.cancel()
        assert work.done()
        assert work.cancel()
        assert work.wait() == Envelope(ANY_SOURCE, ANY_TAG, 0)
        waiter = threading.Thread(target=messages.irecv(x, 0, 9).wait)
        waiter.start()
        comm.barrier()
        check_received(y, other.wait(), 0, 1, 3)
        assert not other.cancel()
        check_received(y, other.wait(), 0, 1, 3)
        messages.send(x, 0, 2)
        waiter.join()
        assert (x[:3] == message(0, 3, 9)).all()
    else:
        comm.barrier()
        send = messages.isend(message(0, 3), 1, 1)
        assert not send.cancel()
        messages.recv(x, 1, 2)
        messages.send(message(0, 3, 9), 1, 9)
        assert send.wait()
    check_usable(comm)


@pytest.mark.ranks(1)
def test_cancel_ends_the_wait_of_another_thread(comm):
    """The thread that waits for a withdrawn receive returns."""
    work, ended = comm.messages.irecv(np.zeros(1), comm.rank, 0), []
    waiter = threading.Thread(target=lambda: ended.append(work.wait()))
    waiter.start()
    assert work.cancel()
    waiter.join()
    assert ended == [Envelope(ANY_SOURCE, ANY_TAG, 0)]
