"""Requests of plain arrays, which the core starts and waits for: lifetimes, failures, threads, persistent ones."""

import gc
import textwrap
import weakref
from concurrent.futures import ThreadPoolExecutor

import mpi_programs
import numpy as np
import pytest
from mpi_programs import MPI

from harness.failures import raised, until
from ringcomm.transports.requests import PendingOperation, RequestHandle, RequestMaker

pytestmark = pytest.mark.slow

# A program begins with this where a call of Waitany must sleep: then, with the lock held that its end takes, it runs
# the next function of `before_sleep`.
SLEEPS = """
import threading
from ringcomm.mpi4py.requests import operations

before_sleep = []

class Ended(threading.Condition):
    def wait(self, timeout=None):
        if before_sleep:
            before_sleep.pop()()
        return super().wait(timeout)

operations._ended = Ended()
"""


@mpi_programs.on(2)
def test_the_array_of_a_dropped_request_lives_until_the_transfer_is_done(comm):
    peer = 1 - comm.rank

    def dropped(start):
        array = np.zeros(1 << 20)
        start(array)
        return weakref.ref(array)

    def released(array):
        comm.Isend(np.zeros(1), comm.rank, 9)  # a start lets go of transfers that are done
        comm.Recv(np.zeros(1), comm.rank, 9)
        return array() is None

    receive = dropped(lambda array: comm.Irecv(array, peer, 1))
    persistent = dropped(lambda array: comm.Recv_init(array, peer, 2).Start())
    assert receive() is not None
    assert persistent() is not None
    comm.Barrier()
    send = dropped(lambda array: comm.Issend(array, peer, 3))
    for tag in (1, 2):
        comm.Send(np.ones(1 << 20), peer, tag)
    assert send() is not None
    comm.Barrier()
    comm.Recv(np.zeros(1 << 20), peer, 3)
    for array in (receive, persistent, send):
        until(lambda array=array: released(array), "the release of an array")


@mpi_programs.on(1)
def test_a_request_in_a_cycle_with_its_operation_is_collected(comm):
    request = comm.Recv_init(np.zeros(1), 0)
    request._object.request = request
    known = weakref.ref(request)
    del request
    gc.collect()
    assert known() is None


def test_a_request_maker_refuses_types_of_another_layout():
    with pytest.raises(TypeError, match="RequestHandle"):
        RequestMaker(None, PendingOperation, object)
    with pytest.raises(TypeError, match="PendingOperation"):
        RequestMaker(None, RequestHandle, RequestHandle)


@mpi_programs.on(2)
def test_a_failure_in_the_middle_of_a_waitall_leaves_no_request_and_is_heard_once(comm):
    if comm.rank == 0:
        for tag, count in enumerate([1, 4, 2]):
            comm.Send(np.full(count, tag + 1.0), 1, tag)
        return
    heard = []
    comm.Set_errhandler(MPI.Comm.Create_errhandler(lambda _, code: heard.append(code)))
    arrays = [np.zeros(2) for _ in range(3)]
    requests = [comm.Irecv(array, 0, tag) for tag, array in enumerate(arrays)]
    copy = MPI.Request(requests[1])
    assert raised(MPI.Exception, lambda: MPI.Request.Waitall(requests)).Get_error_class() == MPI.ERR_IN_STATUS
    assert not any(requests)
    assert [each.tolist() for each in arrays[::2]] == [[1.0, 0.0], [3.0, 3.0]]
    assert heard == [MPI.ERR_TRUNCATE]
    assert raised(MPI.Exception, copy.Wait).Get_error_class() == MPI.ERR_TRUNCATE
    assert copy.Wait()
    assert len(heard) == 1


def test_a_request_whose_wait_a_signal_has_interrupted_tells_an_error_of_mpi(run_on_world):
    text = """
        import signal

        def interrupt(number, frame):
            while frame and frame.f_code.co_name != "Wait":
                frame = frame.f_back
            if frame:
                signal.setitimer(signal.ITIMER_REAL, 0)
                raise KeyboardInterrupt

        comm.Barrier()
        if comm.rank == 0:
            requests = [comm.Irecv(np.zeros(1), 1), comm.Recv_init(np.zeros(1), 1)]
            requests[1].Start()
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
            for request in (requests[0], *requests):
                try:
                    request.Wait()
                except (KeyboardInterrupt, MPI.Exception) as error:
                    print(type(error).__name__)
        else:
            try:
                comm.Recv(np.zeros(1), 0)
            except MPI.Exception:
                pass
        """
    assert run_on_world(2, text).stdout.splitlines() == ["[0] KeyboardInterrupt", "[0] Exception", "[0] Exception"]


@mpi_programs.on(1)
def test_what_is_no_request_is_refused(comm):
    request = comm.Irecv(np.zeros(1), 0)
    kinds = "all", "any", "some"
    names = [form + kind for form in ("Wait", "wait", "Test", "test", "Get_status_") for kind in kinds]
    for call in (*(getattr(MPI.Request, name) for name in names), MPI.Prequest.Startall):
        for given in (None, 5):
            with pytest.raises(TypeError, match=rf"^requests\[1\]: expected a Request, got {type(given).__name__}$"):
                call([request, given])
    comm.Send(np.ones(1), 0)
    assert request.Wait()


def test_waitany_and_waitsome_tell_failures_and_leave_the_other_requests(run_on_world):
    text = """
        if comm.rank == 0:
            for tag, count in ((1, 4), (0, 1), (2, 4)):
                comm.recv(source=1)
                comm.Send(np.full(count, tag + 1.0), 1, tag)
        else:
            x = np.zeros(2)
            requests = [comm.Irecv(array, 0, tag) for tag, array in enumerate([x, np.zeros(2), np.zeros(2)])]
            for call in (MPI.Request.Waitany, MPI.Request.Waitany, MPI.Request.Waitsome, MPI.Request.Waitany):
                before_sleep.append(lambda: comm.send("asleep", 0))
                try:
                    print(call(requests), end=" ")
                except MPI.Exception as error:
                    print(error.Get_error_string()[:17], end=" ")
                print([bool(each) for each in requests])
            print(x.tolist())
        """
    assert run_on_world(2, SLEEPS + textwrap.dedent(text)).stdout.splitlines() == [
        "[1] MPI_ERR_TRUNCATE: [True, False, True]",
        "[1] 0 [False, False, True]",
        "[1] MPI_ERR_IN_STATUS [False, False, False]",
        "[1] -32766 [False, False, False]",
        "[1] [1.0, 0.0]",
    ]


def test_waitany_ends_when_a_rank_dies_and_when_the_program_completes_an_operation(run_on_world):
    text = """
        import os

        column = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
        if comm.rank == 0:
            comm.recv(source=1, tag=1)
            os._exit(7)
        both = comm.Isendrecv(np.zeros(2), 0, 5, [np.zeros((2, 2)), 1, column], 0, 5)
        requests = [comm.Irecv(np.zeros(2), 0), comm.Ibarrier(), both, MPI.Grequest.Start()]
        before_sleep.append(threading.Thread(target=requests[3].Complete).start)
        print(MPI.Request.Waitany(requests), flush=True)
        before_sleep.append(lambda: comm.send("die", 0, 1))
        try:
            MPI.Request.Waitany(requests)
        except MPI.Exception as error:
            print(error.Get_error_class() == MPI.ERR_PROC_FAILED, flush=True)
        """
    done = run_on_world(2, SLEEPS + textwrap.dedent(text), status=7)
    assert done.stdout.splitlines() == ["[1] 3", "[1] True"]


@mpi_programs.on(2)
def test_persistent_requests_refuse_a_second_start_and_can_be_started_after_a_failure(comm):
    peer = 1 - comm.rank
    column = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    x, y, matrix = np.zeros(2), np.zeros(2), np.zeros((2, 2))
    sends = [comm.Send_init(x, peer, 1), comm.Ssend_init(x, peer, 2)]
    receives = [comm.Recv_init(y, peer, 1), comm.Recv_init([matrix, 1, column], peer, 2)]

    def refused(call):
        return raised(MPI.Exception, call).Get_error_class()

    for number in range(3):
        x[:] = 10 * comm.rank + number
        MPI.Prequest.Startall(receives + sends)
        assert refused(receives[0].Start) == refused(lambda: MPI.Prequest.Startall(receives)) == MPI.ERR_REQUEST
        MPI.Request.Waitall(receives + sends)
        MPI.Request.Waitall(receives + sends)  # none is active
        assert y.tolist() == matrix[:, 0].tolist() == [10 * peer + number] * 2

    short = comm.Recv_init(np.zeros(1), peer, 3)
    for _ in range(2):
        short.Start()
        comm.Send(x, peer, 3)
        assert refused(short.Wait) == MPI.ERR_TRUNCATE
        assert short
    twice = comm.Recv_init(y, peer, 4)
    assert refused(lambda: MPI.Prequest.Startall([twice, twice])) == MPI.ERR_REQUEST
    assert twice.Test()
    twice.Start()
    comm.Barrier()
    comm.Send(x, peer, 4)
    assert twice.Wait()
    assert twice.Test()
    for each in [*sends, *receives, twice]:
        each.Free()
    for call in (twice.Start, lambda: MPI.Prequest.Startall([twice])):
        assert refused(call) == MPI.ERR_REQUEST


@mpi_programs.on(2)
def test_several_threads_wait_for_one_request(comm):
    peer = 1 - comm.rank
    for number in range(20):
        x = np.zeros(1)
        request = comm.Irecv(x, peer)
        copies = [request, request, MPI.Request(request), MPI.Request(request)]
        with ThreadPoolExecutor(4) as pool:
            ended = [pool.submit(each.Wait) for each in copies]
            comm.Isend(np.full(1, float(number)), peer).Wait()
        assert all(each.result() for each in ended)
        assert not any(copies)
        assert x[0] == number


@mpi_programs.on(3)
def test_nonblocking_collectives_of_plain_arrays_meet_those_of_others_and_tell_their_error_once(comm):
    rank, size = comm.rank, comm.size
    x, blocks, z = np.full(2, rank + 1.0), np.zeros(2 * size), np.full(2, rank * 5.0)
    into, bcast = (blocks, z) if rank else ([blocks, 2, MPI.DOUBLE], [z, 2, MPI.DOUBLE])
    MPI.Request.Waitall([comm.Iallgather(x, into), comm.Ibcast(bcast, 1)])
    assert blocks.tolist() == [1, 1, 2, 2, 3, 3]
    assert z.tolist() == [5, 5]
    heard = []
    comm.Set_errhandler(MPI.Comm.Create_errhandler(lambda _, code: heard.append(code)))
    request = comm.Iallreduce(np.zeros(1 + rank), np.zeros(1 + rank))
    copy = MPI.Request(request)
    for each in (request, copy):
        assert raised(MPI.Exception, each.Wait).Get_error_class() == MPI.ERR_OTHER
        assert not each
        assert len(heard) == 1


def test_a_call_that_waits_lets_other_threads_run(run_on_world):
    """A small call keeps the GIL, but only until it has to wait."""
    text = """
        import threading, time

        peer = 1 - comm.rank
        x, y = np.ones(2), np.zeros(2)
        count = 0

        def run_beside():
            global count
            while True:
                count += 1
                time.sleep(0.001)

        threading.Thread(target=run_beside, daemon=True).start()
        calls = {
            "Barrier": comm.Barrier,
            "Allreduce": lambda: comm.Allreduce(x, y),
            "allgather": lambda: comm.allgather(None),
            "Recv": lambda: comm.Send(x, 0) if comm.rank else comm.Recv(y, 1),
            "recv": lambda: comm.send(None, 0) if comm.rank else comm.recv(source=1),
            "Sendrecv": lambda: comm.Sendrecv(x, peer, 0, y, peer),
            "Waitall": lambda: MPI.Request.Waitall([comm.Irecv(y, peer), comm.Isend(x, peer)]),
            "Wait": lambda: comm.Iallreduce(x, y).Wait(),
        }
        for name, call in calls.items():
            comm.Barrier()
            if comm.rank:
                time.sleep(0.1)
            count = 0
            call()
            if comm.rank == 0:
                print(name, count > 3)
    """
    names = ("Barrier", "Allreduce", "allgather", "Recv", "recv", "Sendrecv", "Waitall", "Wait")
    assert run_on_world(2, text).stdout.splitlines() == [f"[0] {name} True" for name in names]
