"""Messages as MPI matches them: any source, any tag, any length that fits; synchronous sends; failures."""

import os
import signal
import time

import numpy as np
import pytest

import harness
import ringcomm
from cases.between_hosts import everywhere, run_on
from cases.reference import assert_same, filled
from harness.failures import PROMPT, check_usable, outcomes, raised, until, until_waiting
from ringcomm import ArgumentError, CollectiveTimeout, MismatchError, PeerLost, RingcommError
from ringcomm.native import NULL, lib
from ringcomm.transports.calls import TransferCall
from ringcomm.transports.messages import ANY_SOURCE, ANY_TAG, Envelope
from ringcomm.types import DTYPES

LENGTHS = (0, 1, 7, 81, 100 << 10, (1 << 20) + 1, 5 << 20)  # bytes
LARGE = 5 << 20
EITHER = pytest.mark.parametrize("length", [40, LARGE], ids=["eager", "large"])


def message(source, length, salt=0):
    return filled(source, length, "uint8", salt)


def room(length):
    """Return memory for a message, and for more."""
    return np.full(length + 9, 0xEE, np.uint8)


def check_received(x, envelope, source, tag, length, salt=0):
    assert envelope == Envelope(source, tag, length)
    assert_same(x[:length], message(source, length, salt), f"{length} bytes")
    assert (x[length:] == 0xEE).all()


def lengths(comm):
    """Messages of every length go around a ring, into memory that is larger, in each way to send and receive."""
    messages, left, right = comm.messages, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for salt, length in enumerate(LENGTHS):
        data = message(comm.rank, length, salt)
        for synchronous in (False, True):
            x, y, z = room(length), room(length), room(length)
            sends = [messages.isend(data, right, tag, synchronous) for tag in (4, 5, 6)]
            check_received(x, messages.recv(x, ANY_SOURCE, 4), left, 4, length, salt)
            check_received(y, messages.irecv(y, left, 5).wait(), left, 5, length, salt)
            assert messages.probe(ANY_SOURCE, 6) == Envelope(left, 6, length)
            taken = messages.take(left, 6)
            check_received(z, taken.recv(z), left, 6, length, salt)
            assert all(send.wait() == (ANY_SOURCE, ANY_TAG, 0) for send in sends)
        if comm.size > 1:
            first, second = (messages.send, messages.recv) if comm.rank % 2 else (messages.recv, messages.send)
            first(data if comm.rank % 2 else x, comm.rank ^ 1, 0)
            second(x if comm.rank % 2 else data, comm.rank ^ 1, 0)
            assert_same(x[:length], message(comm.rank ^ 1, length, salt))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_messages_of_every_length_are_received_into_larger_memory(size, world):
    harness.run(lengths, size, world=world)


def test_messages_are_received_between_hosts():
    run_on("0011", lengths)


@everywhere
def test_messages_of_unknown_length_are_received_as_bytes(comm):
    """Bytes are sent as arrays are, a receive finds the memory for them, and an exchange does both at once."""
    messages, peer = comm.messages, 1 - comm.rank
    for length in LENGTHS:
        sent, theirs = (message(rank, length).tobytes() for rank in (comm.rank, peer))
        work = messages.isend(sent, peer, 7)
        assert messages.recv_bytes(ANY_SOURCE, ANY_TAG) == (theirs, Envelope(peer, 7, length))
        work.wait()
        x = room(length)
        mine = message(comm.rank, length)
        found = Envelope(*comm.fast_path.sendrecv_message(mine, peer, comm.rank, x, ANY_SOURCE, peer))
        check_received(x, found, peer, peer, length)
    comm.barrier()


@pytest.mark.ranks(1, world="threads")
def test_arrays_of_any_dtype_are_sent_as_bytes(comm):
    """Arrays of any dtype and number of axes are sent as their bytes; an unknown dtype takes no other way."""
    for dtype in ("f4,i8", "g", "float16", ">i4", "S3", "bool", "complex128"):
        x = np.frombuffer(message(comm.rank, 6 * np.dtype(dtype).itemsize).tobytes(), dtype).reshape(2, 3)
        work, y = comm.messages.isend(x, comm.rank, 0), np.zeros((3, 2), dtype)
        assert comm.messages.recv(y, comm.rank, 0).size == x.nbytes
        work.wait()
        assert x.tobytes() == y.tobytes()
    for x, words in (
        (np.array([None]), "dtype: expected one without Python objects"),
        (np.zeros((4, 4))[:, 1], "C-contiguous"),
        (np.frombuffer(b"read-only", np.uint8), "writable"),
    ):
        assert words in str(raised(ArgumentError, lambda x=x: comm.messages.recv(x, 0, 0)))
    assert "peer is 1" in str(raised(ArgumentError, lambda: comm.messages.send(np.zeros(1), 1, 0)))
    assert "peer is -2" in str(raised(ArgumentError, lambda: comm.messages.probe(-2, 0)))


WRONG = {"kind": -1, "peer": 7, "timeout": float("nan"), "dtype": 99, "count": 1}  # without memory


def transfer(kind):
    return TransferCall(kind, NULL, 0, DTYPES["uint8"], 0, 0, -1.0)


@pytest.mark.ranks(1, world="threads")
def test_an_error_of_an_exchange_says_of_which_transfer(comm):
    right = {"sent": transfer(lib.RC_SEND), "received": transfer(lib.RC_RECV)}
    for which in right:
        for field, value in WRONG.items():
            given = right | {which: right[which]._replace(**{field: value})}
            error = raised(ArgumentError, lambda given=given: comm._router.exchange(**given))
            assert str(error).startswith(f"{which}: ")
            assert error.argument == which


# --- Matching ---------------------------------------------------------------------------------------------------------


@everywhere
def test_the_first_message_meets_the_first_receive_that_matches(comm):
    """Each message goes to the first receive that matches, each receive gets the first message that matches."""
    messages, peer = comm.messages, 1 - comm.rank
    sizes = [(3, 200_000)[number % 4 == 2] for number in range(12)]
    wanted = [(ANY_SOURCE, 0), (peer, ANY_TAG), (ANY_SOURCE, ANY_TAG), (peer, 2)]
    order = [0, 1, 2, 5, 3, 4, 6, 8, 9, 7, 10, 11]
    for posted_first in (True, False):
        arrays = [room(max(sizes)) for _ in sizes]

        def receive(arrays=arrays):
            return [messages.irecv(x, *wanted[turn % 4]) for turn, x in enumerate(arrays)]

        receives = receive() if posted_first else []
        comm.barrier()
        sends = [messages.isend(message(comm.rank, size, n), peer, n % 3) for n, size in enumerate(sizes)]
        if not posted_first:
            until(lambda: messages.iprobe(peer, 2), "a message")  # behind others
            receives = receive()
        for n, x, work in zip(order, arrays, receives, strict=True):
            assert work.wait() == Envelope(peer, n % 3, sizes[n])
            assert_same(x[: sizes[n]], message(peer, sizes[n], n), f"message {n}, {posted_first}")
        for work in sends:
            work.wait()


@pytest.mark.ranks(4)
def test_a_receive_from_any_source_names_the_sender(comm):
    """Rank 0 receives from all by one receive after the other; what does not fit its tag stays."""
    others = range(1, comm.size)
    if comm.rank:
        comm.messages.send(np.array([comm.rank]), 0, 7)
        comm.messages.send(np.array([comm.rank]), 0, comm.rank)
    else:
        x = np.zeros(2, np.int64)
        assert sorted(comm.messages.recv(x, ANY_SOURCE, 7).source for _ in others) == [*others]
        for rank in reversed(others):
            assert comm.messages.recv(x, ANY_SOURCE, rank) == (rank, rank, 8)
            assert x[0] == rank


@pytest.mark.ranks(2)
def test_receives_of_both_kinds_share_the_messages(comm):
    """A receive of `recv` takes a message by its own rules; to it the tag that means any here is a tag like others."""
    data = np.ones(2, np.uint8)
    if comm.rank == 0:
        comm.messages.send(data, 1, 3)
        comm.send(data, 1, tag=4)
        comm.send(data, 1, tag=ANY_TAG)
        comm.messages.send(data, 1, 3)
        raised(MismatchError, lambda: comm.messages.send(data[:1], 1, 3, True))
    else:
        x = np.zeros_like(data)
        comm.recv(x, 0, ANY_TAG)
        comm.recv(x, 0, 3)
        assert comm.messages.recv(x, 0, ANY_TAG).tag == 4
        raised(MismatchError, lambda: comm.recv(x[:1], 0, 3))
        raised(MismatchError, lambda: comm.recv(x, 0, 3))
    check_usable(comm)


@EITHER
@pytest.mark.parametrize("posted", [True, False])
@pytest.mark.parametrize("synchronous", [True, False])
@everywhere
def test_a_message_that_is_too_long_fails_its_receive_alone(comm, length, posted, synchronous):
    """A message that is too long is lost to its receiver alone; the next one is received."""
    if comm.rank == 0:
        comm.barrier()
        comm.messages.send(message(0, length), 1, 5, synchronous)
        comm.messages.send(message(0, 3), 1, 5)
    else:
        x, y = room(30), room(30)
        calls = [lambda: comm.messages.recv(x, ANY_SOURCE, ANY_TAG), lambda: comm.messages.recv(y, 0, 5)]
        if posted:
            works = [comm.messages.irecv(x, ANY_SOURCE, ANY_TAG), comm.messages.irecv(y, 0, 5)]
            calls = [work.wait for work in works]
        comm.barrier()
        error = raised(MismatchError, calls[0])
        assert str(error) == f"rank 0 sent {length} bytes, but recv(at most 39 bytes, from any) with any tag"
        assert (error.peer, error.expected, error.got) == (0, "at most 39 bytes", f"{length} bytes")
        assert (x == 0xEE).all()
        y[30:] = 0xEE
        check_received(y, calls[1](), 0, 5, 3)
    check_usable(comm)


# --- Synchronous sends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 4097, LARGE])
@everywhere
def test_a_synchronous_send_is_done_once_it_is_received(comm, length):
    messages = comm.messages
    if comm.rank == 0:
        work = messages.isend(message(0, length), 1, 0, True)
        comm.barrier()
        assert not work.done()
        messages.send(message(0, 0), 1, 1)
        work.wait()
        messages.send(message(0, length), 1, 0, True)
    else:
        x = room(length)
        comm.barrier()
        messages.recv(x, 0, 1)
        assert messages.iprobe(0, 0).size == length
        for _ in range(2):
            check_received(x, messages.recv(x, 0, 0), 0, 0, length)
            x.fill(0xEE)


@pytest.mark.ranks(2)
def test_a_synchronous_send_to_oneself_needs_a_receive(comm):
    messages, me, x = comm.messages, comm.rank, room(40)
    for receive in (
        lambda: messages.recv(x, me, 1),
        lambda: messages.irecv(x, me, ANY_TAG).wait(),
        lambda: messages.take(ANY_SOURCE, 1).recv(x),
    ):
        work = messages.isend(message(me, 40), me, 1, True)
        assert messages.iprobe(me, 1) == Envelope(me, 1, 40)
        assert not work.done()
        check_received(x, receive(), me, 1, 40)
        assert work.done()
        x.fill(0xEE)
    posted = messages.irecv(x, me, 1)
    messages.send(message(me, 40), me, 1, True)
    check_received(x, posted.wait(), me, 1, 40)
    too_long = messages.isend(message(me, 40), me, 1, True)
    raised(MismatchError, lambda: messages.recv(np.zeros(1, np.uint8), me, 1))
    too_long.wait()


def stuck_with_oneself(comm):
    if comm.rank == 0:
        work = comm.messages.isend(np.zeros(1), 0, 3, True)
        error = raised(CollectiveTimeout, work.wait)
        assert "rank 0 waited 0.3 s for send(uint8 x 8, to 0) with tag 3" in str(error)
        assert work.done()


def test_a_synchronous_send_to_oneself_without_a_receive_times_out():
    ringcomm.launch(stuck_with_oneself, 2, world="threads", timeout=0.3)


# --- Failures, and what they are called -------------------------------------------------------------------------------


def probe_until_it_dies(comm, how):
    messages = comm.messages
    if comm.rank == 2:
        if how != "iprobe":
            for rank in (0, 1):
                until_waiting(comm, rank)
        os.kill(os.getpid(), signal.SIGKILL)
    source = 2 if comm.rank else ANY_SOURCE

    def poll():
        while messages.iprobe(source, 0) is None:
            pass

    error = raised(PeerLost, poll if how == "iprobe" else lambda: getattr(messages, how)(source, 0))
    assert error.rank == 2
    return str(raised(PeerLost, lambda: messages.iprobe(0, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["take", "iprobe"])
def test_a_probe_ends_when_its_peer_dies(how):
    answers, ends = {}, {}
    with harness.world(3) as pool:
        for rank, answer, when in outcomes(pool, probe_until_it_dies, how):
            answers[rank], ends[rank] = answer, when
    assert isinstance(answers.pop(2), ConnectionError)
    assert len({*answers.values()}) == 1
    assert "needed it for probe(from " in answers[0]
    assert max(ends.values()) - ends[2] < PROMPT


@pytest.mark.ranks(2)
def test_a_closed_rank_ends_a_probe_that_waits(comm):
    """A rank that has closed is no failure for who only polls."""
    group = comm.split(0)
    if comm.rank == 0:
        group.close()
    comm.barrier()
    if comm.rank == 1:
        end = time.monotonic() + 0.3  # more than the interval between the checks for dead ranks
        while time.monotonic() < end:
            assert group.messages.iprobe(0, ANY_TAG) is group.messages.itake(ANY_SOURCE, 0) is None
        error = raised(PeerLost, lambda: group.messages.probe(0, ANY_TAG))
        assert str(error) == "rank 0 closed the communicator while rank 1 needed it for probe(from 0) with any tag"
    comm.barrier()


@pytest.mark.ranks(2)
def test_a_communicator_closes_while_receives_wait(comm):
    """Works and what they are for may be dropped, and a communicator may be closed while receives wait."""
    group = comm.split(0)
    x = np.zeros(1000)
    for tag in range(50):
        group.messages.irecv(x[tag:], ANY_SOURCE, tag)
    work = group.messages.irecv(np.zeros(1), ANY_SOURCE, 99)
    group.messages.isend(np.ones(1 << 17), 1 - comm.rank, 100, True)
    comm.barrier()
    group.close()
    raised(RingcommError, work.wait)  # this rank has closed, or the other one before it
    assert not work.cancel()
    assert "closed" in str(raised(ArgumentError, lambda: group.messages.iprobe(0, 0)))


@pytest.mark.ranks(1)
def test_the_report_names_receives_and_probes(comm):
    comm = comm.split(0)  # with a record of its own
    works = [comm.messages.irecv(np.zeros(5), peer, 1) for peer in (ANY_SOURCE, comm.rank)]
    report = comm._transport.report(9)
    assert "recv(at most 40 bytes, from any) with tag 1, running" in report
    assert f"recv(at most 40 bytes, from {comm.rank}) with tag 1, running" in report
    for work in works:
        assert work.cancel()
    comm.messages.send(np.zeros(5), comm.rank, 1)
    assert comm.messages.take(comm.rank, ANY_TAG).recv(np.zeros(5)).size == 40
    for _ in range(20):
        assert comm.messages.iprobe(ANY_SOURCE, ANY_TAG) is None
    assert f"probe(from {comm.rank}) with any tag, done" in comm._transport.report(9)
    assert "probe(from any)" not in comm._transport.report(99)
