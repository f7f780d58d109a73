"""Failures of calls on device arrays: late, mismatched, lost and interrupted ranks."""

import os
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest

import harness
from cases.on_device import Gate, behind_a_gate
from cases.reference import assert_same
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, Communicator, MismatchError, PeerLost
from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.devices import emulated
from ringcomm.testing import connect_threads, run_threads
from ringcomm.transports import shm
from ringcomm.transports.cuda import failures

SHORT = 0.3  # seconds, of a wait that times out


@pytest.mark.usefixtures("streams_as_on_a_gpu")
@pytest.mark.ranks(2, world="threads")
def test_a_failure_after_the_launch_is_raised_by_the_next_call(comm):
    x, gate = emulated.array(np.ones(10)), Gate()
    comm.all_reduce(x)
    gate.hold(emulated.device.stream())
    if comm.rank == 1:
        comm.broadcast(x)
    else:
        comm.all_reduce(x)
        comm.all_reduce(x)  # launched before the mismatch is known: no rank can tell which calls correspond
    gate.open()
    emulated.device.stream().synchronize()
    for _ in range(2):
        with pytest.raises(MismatchError, match="broadcast"):
            comm.all_reduce(x)


def left_alone(comm, noticed, seen):
    """Launch a call that no peer makes, and close."""
    x = emulated.array(np.ones(5))
    comm.all_reduce(x)
    comm.synchronize()
    comm.barrier()
    if comm.rank == 1:
        with pytest.raises(CollectiveTimeout):
            comm.recv(np.empty(1), 0)  # until its peer has timed out
        noticed.set()
        return
    comm.all_reduce(x, timeout=SHORT)
    if seen == "after":
        assert noticed.wait(harness.OPERATION)
    if seen == "raised":
        with pytest.raises(CollectiveTimeout):
            comm.synchronize()
        comm.close()
        return
    with pytest.raises(CollectiveTimeout, match=r"rank 0 waited 0.3 s in all_reduce.*not called by rank 1"):
        comm.close()
    with pytest.raises(ArgumentError, match="closed"):
        comm.all_reduce(x)
    comm.close()  # has no effect


@pytest.mark.parametrize("seen", ["during", "after", "raised"])
@pytest.mark.usefixtures("streams_as_on_a_gpu")
def test_close_raises_a_failure_that_no_call_has_raised(seen):
    """The kernel fails while close() waits for it, or before; or a call has raised that."""
    noticed = threading.Event()
    ends = connect_threads(shm.connect, 2)
    run_threads(lambda comm: left_alone(comm, noticed, seen), [Communicator(end) for end in ends])


@pytest.mark.usefixtures("streams_as_on_a_gpu")
@pytest.mark.ranks(2, world="threads")
def test_close_raises_a_mismatch_that_no_call_has_raised(comm):
    x = emulated.array(np.ones(5))
    comm.all_reduce(x, "max")
    comm.synchronize()
    comm.barrier()
    comm.all_reduce(x, "max" if comm.rank else "sum")
    with pytest.raises(MismatchError, match=r"all_reduce.float64 x 5, max."):
        comm.close()


@pytest.mark.usefixtures("streams_as_on_a_gpu")
@pytest.mark.ranks(2, world="threads")
def test_close_does_not_replace_the_error_that_has_ended_a_block(comm):
    def block():
        with comm:
            comm.all_reduce(x, timeout=SHORT)
            raise ZeroDivisionError

    x = emulated.array(np.ones(5))
    comm.all_reduce(x)
    comm.synchronize()
    comm.barrier()
    if comm.rank == 1:
        with pytest.raises((Aborted, CollectiveTimeout)):
            comm.recv(np.empty(1), 0)
        return
    with pytest.raises(ZeroDivisionError):
        block()


@pytest.mark.ranks(3, world="threads")
def test_a_mismatch_names_the_calls_of_all_ranks_even_a_late_one(comm):
    x = emulated.array(np.ones(5))
    comm.all_reduce(x)
    if comm.rank == 1:
        time.sleep(SHORT)
    with pytest.raises(MismatchError) as caught:
        comm.all_reduce(x, "max" if comm.rank == 2 else "min")
    _, *lines = str(caught.value).splitlines()
    assert lines == ["  ranks 0 and 1: all_reduce(float64 x 5, min)", "  rank 2: all_reduce(float64 x 5, max)"]


@pytest.mark.ranks(3, world="threads")
def test_counts_that_do_not_fit_are_a_mismatch_on_every_rank(comm):
    me, n = comm.rank, comm.size
    x, room = emulated.array(np.arange(4.0 * n)), emulated.array(np.full(5 * n, -1.0))
    counts = [2] * n
    wrong = [3 if rank == me else 2 for rank in range(n)]
    with pytest.raises(ArgumentError, match=r"recv_counts, of this rank's own block: expected 2, .*, got 3"):
        comm.all_to_all(x[: 2 * n], out=room[: 2 * n + 1], send_counts=counts, recv_counts=wrong)
    assert_same(comm.all_to_all(x[: 2 * n], send_counts=counts, recv_counts=counts), np.tile(x[2 * me : 2 * me + 2], n))
    send = [3 if me == 0 and rank == 1 else 2 for rank in range(n)]  # more than rank 1 expects
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"all_to_all.*sends . elements to rank . and expects 2") as caught:
            comm.all_to_all(x[: sum(send)], out=room[: 2 * n], send_counts=send, recv_counts=counts)
        assert caught.value.rank in (0, 1)
    assert_same(room, np.full(5 * n, -1.0)) if me < 2 else assert_same(room[2 * n :], np.full(3 * n, -1.0))


@pytest.mark.ranks(2, 3, world="threads")
def test_all_to_all_with_counts_beside_another_call_is_a_mismatch_of_calls(comm):
    me, n = comm.rank, comm.size
    x, out = emulated.array(np.arange(2.0 * n) + me), emulated.array(np.full(2 * n, -1.0))
    for odd in range(n):
        call = comm.all_reduce if me == odd else partial(comm.all_to_all, send_counts=[2] * n, recv_counts=[2] * n)
        with pytest.raises(MismatchError) as caught:
            call(x, out=out)
        _, *lines = str(caught.value).splitlines()
        others = format_ranks([rank for rank in range(n) if rank != odd])
        expected = {
            f"  rank {odd}: all_reduce(float64 x {2 * n}, sum)",
            f"  {others}: all_to_all(float64, with counts)",
        }
        assert (set(lines), len(lines)) == (expected, 2)
        assert_same(x, np.arange(2.0 * n) + me)
        assert_same(out, np.full(2 * n, -1.0))
    assert_same(comm.all_reduce(x, out=out), np.arange(2.0 * n) * n + sum(range(n)))
    counts = comm.all_to_all(x, send_counts=[2] * n, recv_counts=[2] * n)
    assert_same(counts, np.concatenate([[2.0 * me + rank, 2.0 * me + rank + 1] for rank in range(n)]))


@pytest.mark.usefixtures("streams_as_on_a_gpu")
@pytest.mark.ranks(2, world="threads")
def test_an_error_is_raised_by_its_own_work(comm):
    good = comm.all_reduce(emulated.array(np.ones(5)), async_op=True)
    bad = comm.all_reduce(emulated.array(np.ones(4 + comm.rank)), async_op=True)
    time.sleep(SHORT)
    assert_same(good.wait(), np.full(5, float(comm.size)))
    for _ in range(2):
        with pytest.raises(MismatchError):
            bad.wait()
    assert_same(good.wait(), np.full(5, float(comm.size)))
    again = comm.all_reduce(emulated.array(np.ones(5)), async_op=True)
    assert_same(again.synchronize(), np.full(5, float(comm.size)))


@pytest.mark.ranks(3, world="threads")
def test_an_abort_ends_waiting_kernels(comm):
    comm.all_reduce(emulated.array(np.ones(5)))
    if comm.rank == 0:
        threading.Timer(SHORT, comm.abort, ["enough"]).start()
        with pytest.raises(Aborted, match="enough"):
            comm.recv(np.empty(1), 1)
    else:
        with pytest.raises(Aborted, match="enough"):
            comm.all_reduce(emulated.array(np.ones(5)))


@pytest.mark.ranks(3, world="threads")
def test_a_rank_that_closes_is_lost_to_its_peers(comm):
    comm.all_reduce(emulated.array(np.ones(5)))
    if comm.rank == 2:
        comm.close()
        return
    with pytest.raises(PeerLost) as caught:
        comm.all_reduce(emulated.array(np.ones(5)))
    assert caught.value.rank == 2
    assert "all_reduce(float64 x 5, sum)" in str(caught.value)


@pytest.mark.ranks(2, world="processes", fresh=True)
def test_a_signal_handler_that_raises_ends_a_call(comm):
    x = emulated.array(np.ones(100_000))
    comm.all_reduce(x)
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: int("nonsense"))
        signal.setitimer(signal.ITIMER_REAL, SHORT)
        with pytest.raises(ValueError, match="nonsense"):
            comm.all_reduce(x)
    else:
        with pytest.raises(Aborted, match="rank 0 was interrupted by a signal"):
            comm.recv(x, 0)
    with pytest.raises(Aborted, match="rank 0 was interrupted by a signal"):
        comm.all_reduce(x)


@pytest.mark.usefixtures("streams_as_on_a_gpu")
@pytest.mark.ranks(2, world="threads")
def test_synchronize_has_a_timeout(comm):
    work, gate = behind_a_gate(comm)
    if comm.rank == 0:
        threading.Timer(3 * SHORT, gate.open).start()
        with pytest.raises(
            CollectiveTimeout, match=r"rank 0 waited 0.3 s for all_reduce.float64 x 5, sum. on emulated"
        ):
            work.synchronize(timeout=SHORT)
    else:
        gate.open()
        with pytest.raises(CollectiveTimeout, match=r"rank 0 waited 0.3 s"):
            work.synchronize()


@pytest.mark.ranks(2, world="processes")
def test_a_forked_child_exits_at_once_without_effect(comm):
    emulated.EmulatedDevice.blocking = False
    work, gate = behind_a_gate(comm)
    child = os.fork()
    if not child:
        comm.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    gate.open()
    emulated.EmulatedDevice.blocking = True
    assert_same(work.wait(), np.full(5, float(comm.size)))


@pytest.mark.ranks(2, world="processes", fresh=True)
def test_a_signal_handler_that_closes_ends_the_call_that_it_interrupts(comm):
    x = emulated.array(np.ones(100_000))
    comm.all_reduce(x)
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: comm.close())
        signal.setitimer(signal.ITIMER_REAL, SHORT)
    with pytest.raises(Aborted, match="rank 0 was closed by a signal handler"):
        comm.all_reduce(x) if comm.rank == 0 else comm.recv(x, 0)


@pytest.mark.ranks(2, world="processes", fresh=True)
def test_a_signal_handler_cannot_call_in_the_middle_of_a_call(comm):
    x, refused = emulated.array(np.ones(5)), []

    def handler(*_):
        with pytest.raises(
            ArgumentError, match="a signal handler must not wait for the communicator that it interrupted"
        ):
            comm.all_reduce(x)
        refused.append(True)

    comm.all_reduce(x)
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, SHORT)
    else:
        time.sleep(2 * SHORT)
    comm.all_reduce(x)
    assert len(refused) == (comm.rank == 0)
    assert_same(x, np.full(5, float(comm.size) ** 2))


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ([("a", False), ("b", False)], "made different calls"),
        ([("a", True), ("b", True)], "made different calls"),
        ([("a", False), ("a", True)], "do not agree on where their arrays lie in symmetric buffers"),
        ([("a", True)] * 2, "do not agree on where their arrays lie in symmetric buffers"),
        ([("a", False)] * 2, "chose different kernels"),
        ([], "made different calls"),
    ],
)
def test_a_mismatch_says_what_differs(calls, text):
    assert failures._disagreement(calls).startswith(text)
