"""When ranks with arrays on devices are late, differ, die or are interrupted: what is raised, and what holds then."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import harness
import ringcomm
from on_device import behind_a_gate
from reference import assert_same
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, Communicator, MismatchError, PeerLost
from ringcomm.devices import emulated
from ringcomm.testing import connect_threads, run_threads
from ringcomm.transports import shm
from ringcomm.transports.cuda import group

SHORT = 0.3  # seconds, the deadline of those who wait in vain


def told_later(comm):
    x, gate = emulated.array(np.ones(10)), emulated.Event()
    comm.all_reduce(x)
    emulated.device.stream().wait_event(gate)
    if comm.rank == 1:
        comm.broadcast(x)
    else:
        comm.all_reduce(x)
        comm.all_reduce(x)  # launched before it is known that the first fails: which calls belong together?
    gate.reach()
    emulated.device.stream().synchronize()
    for _ in range(2):
        with pytest.raises(MismatchError, match="broadcast"):
            comm.all_reduce(x)


@pytest.mark.usefixtures("streams_as_on_a_gpu")
def test_what_goes_wrong_after_the_launch_is_raised_by_the_next_call():
    ends = connect_threads(shm.connect, 2)
    run_threads(told_later, [Communicator(end) for end in ends])


def different(comm):
    odd = comm.rank == comm.size - 1
    for length, other in ((4, 5), (100_000, 4), (4, 100_000)):
        x = emulated.array(np.ones(other if odd else length))
        with pytest.raises(MismatchError, match=rf"all_reduce\(float64 x {length}, sum\)") as caught:
            comm.all_reduce(x)
        assert f"x {other}, sum" in str(caught.value)
        assert_same(x, np.ones_like(x))
        with pytest.raises(MismatchError, match="broadcast"):
            comm.broadcast(x) if odd else comm.all_reduce(x)
    x = emulated.array(np.ones(7))
    assert_same(comm.all_reduce(x), np.full(7, float(comm.size)))


def test_ranks_that_differ_are_named_and_the_group_stays_usable(world):
    harness.run(different, 3, world=world)


def test_a_kernel_may_fail_before_its_launch_has_returned(monkeypatch):
    start = group.CudaGroup._start

    def slow(gpus, *call):
        event = start(gpus, *call)
        while not event.done:
            time.sleep(1e-4)
        gpus.look()  # as the watcher may at this very moment
        return event

    monkeypatch.setattr(group.CudaGroup, "_start", slow)
    ends = connect_threads(shm.connect, 3)
    run_threads(different, [Communicator(end) for end in ends])


def a_late_one_differs(comm):
    x = emulated.array(np.ones(5))
    comm.all_reduce(x)
    if comm.rank == 1:
        time.sleep(SHORT)
    with pytest.raises(MismatchError) as caught:
        comm.all_reduce(x, "max" if comm.rank == 2 else "min")
    assert all(f"rank {rank}: all_reduce(float64 x 5, {op})" in str(caught.value)
               for rank, op in enumerate(("min", "min", "max")))  # fmt: skip


def test_a_mismatch_names_all_ranks_also_one_that_is_late():
    harness.run(a_late_one_differs, 3, world="threads")


def counts_that_do_not_fit(comm):
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


def test_counts_that_do_not_fit_are_a_mismatch_on_every_rank():
    harness.run(counts_that_do_not_fit, 3, world="threads")


def one_after_the_other(comm):
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


@pytest.mark.usefixtures("streams_as_on_a_gpu")
def test_an_error_is_that_of_the_work_it_belongs_to():
    harness.run(one_after_the_other, 2, world="threads")


def late(comm, rank):
    comm.all_reduce(emulated.array(np.ones(5)))
    if comm.rank == rank:
        time.sleep(2 * SHORT)
    else:
        with pytest.raises(CollectiveTimeout, match=f"all_reduce.*not called by rank {rank}"):
            comm.all_reduce(emulated.array(np.ones(5)), timeout=SHORT)
    with pytest.raises(CollectiveTimeout):
        comm.all_reduce(emulated.array(np.ones(5)))


def test_a_rank_that_does_not_come_is_named():
    ends = connect_threads(shm.connect, 3)
    run_threads(lambda comm: late(comm, 1), [Communicator(end) for end in ends])


def aborting(comm):
    comm.all_reduce(emulated.array(np.ones(5)))
    if comm.rank == 0:
        threading.Timer(SHORT, comm.abort, ["enough"]).start()
        with pytest.raises(Aborted, match="enough"):
            comm.recv(np.empty(1), 1)
    else:
        with pytest.raises(Aborted, match="enough"):
            comm.all_reduce(emulated.array(np.ones(5)))


def test_an_abort_ends_kernels_that_wait():
    run_threads(aborting, [Communicator(end) for end in connect_threads(shm.connect, 3)])


def leaving(comm):
    comm.all_reduce(emulated.array(np.ones(5)))
    if comm.rank == 2:
        comm.close()
        return
    with pytest.raises(PeerLost) as caught:
        comm.all_reduce(emulated.array(np.ones(5)))
    assert caught.value.rank == 2
    assert "all_reduce(float64 x 5, sum)" in str(caught.value)


def test_a_rank_that_closes_is_lost_to_those_who_need_it():
    run_threads(leaving, [Communicator(end) for end in connect_threads(shm.connect, 3)])


def killed(comm):
    comm.all_reduce(emulated.array(np.ones(5)))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost, match="rank 1") as caught:
        comm.all_reduce(emulated.array(np.ones(100_000)))
    assert caught.value.rank == 1


def test_a_rank_that_dies_is_named_by_all_others():
    with pytest.raises(PeerLost, match="rank 1"):
        ringcomm.launch(killed, 3, world="processes", timeout=harness.OPERATION)


def interrupted(comm):
    x = emulated.array(np.ones(100_000))
    comm.all_reduce(x)
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: int("nonsense"))
        signal.setitimer(signal.ITIMER_REAL, SHORT)
        with pytest.raises(ValueError, match="nonsense"):
            comm.all_reduce(x)
    else:
        with pytest.raises(Aborted, match="rank 0 was interrupted: ValueError"):
            comm.recv(x, 0)
    with pytest.raises(Aborted, match="rank 0 was interrupted: ValueError"):
        comm.all_reduce(x)


def test_a_signal_handler_that_raises_ends_a_call():
    ringcomm.launch(interrupted, 2, world="processes", timeout=harness.OPERATION)


def too_long(comm):
    work, gate = behind_a_gate(comm)
    if comm.rank == 0:
        threading.Timer(3 * SHORT, gate.reach).start()
        with pytest.raises(Aborted, match="rank 0 waited too long"):
            work.synchronize(timeout=SHORT)
    else:
        gate.reach()
        with pytest.raises(Aborted, match="rank 0 waited too long"):
            work.synchronize()


@pytest.mark.usefixtures("streams_as_on_a_gpu")
def test_synchronize_has_a_timeout():
    ends = connect_threads(shm.connect, 2)
    run_threads(too_long, [Communicator(end) for end in ends])


def with_a_child(comm):
    emulated.EmulatedDevice.blocking = False
    work, gate = behind_a_gate(comm)
    child = os.fork()
    if not child:
        comm.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    gate.reach()
    emulated.EmulatedDevice.blocking = True
    assert_same(work.wait(), np.full(5, float(comm.size)))


def test_a_forked_child_ends_at_once_and_harms_nothing():
    harness.run(with_a_child, 2, world="processes")


def closed_by_a_handler(comm):
    x = emulated.array(np.ones(100_000))
    comm.all_reduce(x)
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: comm.close())
        signal.setitimer(signal.ITIMER_REAL, SHORT)
    with pytest.raises(Aborted, match="rank 0 was closed by a signal handler"):
        comm.all_reduce(x) if comm.rank == 0 else comm.recv(x, 0)


def test_a_signal_handler_that_closes_ends_the_call_that_it_interrupts():
    ringcomm.launch(closed_by_a_handler, 2, world="processes", timeout=harness.OPERATION)


def called_by_a_handler(comm):
    x, refused = emulated.array(np.ones(5)), []

    def handler(*_):
        with pytest.raises(ArgumentError, match="by a signal handler, in the middle of another call"):
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


def test_a_signal_handler_cannot_call_in_the_middle_of_a_call():
    ringcomm.launch(called_by_a_handler, 2, world="processes", timeout=harness.OPERATION)
