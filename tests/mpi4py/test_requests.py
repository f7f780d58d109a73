"""Requests, matched messages and buffered sends of ringcomm.mpi4py: what becomes of them where something fails."""

import resource
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import mpi_programs
import numpy as np
import pytest
from mpi_programs import MPI

from harness.failures import raised, until

pytestmark = pytest.mark.slow


@mpi_programs.on(2)
def test_a_refused_sendrecv_leaves_neither_a_message_nor_a_receive_behind(comm):
    right = (comm.rank + 1) % 2
    column = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    x, y, matrix = np.full(2, 7.0), np.zeros(2), np.zeros((2, 2))
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    for target in (y, [matrix, 1, column]):
        for call, *arguments in (
            (comm.Sendrecv, x, right, 0, target, 9),
            (comm.Sendrecv, x, right, 0, target, -9),
            (comm.Sendrecv, x, right, 0, target, right, -9),
            (comm.Sendrecv, x, 9, 0, target, right),
            (comm.Sendrecv, x, -9, 0, target, right),
            (comm.Sendrecv, x, right, -9, target, right),
            (comm.Sendrecv, x, right, 0, frozen, right),
            (comm.Isendrecv, x, right, 0, target, 9),
            (comm.Isendrecv, x, 9, 0, target, right),
            (comm.Sendrecv_replace, x.copy(), right, 0, 9),
            (comm.sendrecv, "object", 9, 0, None, right),
        ):
            with pytest.raises((MPI.Exception, BufferError, ValueError)):
                call(*arguments)
    comm.Barrier()
    assert not comm.Iprobe()
    comm.Barrier()
    comm.Send(x, right)
    comm.Recv(y, right)  # which no receive that was left behind has taken
    assert y.tolist() == [7.0, 7.0]
    assert not matrix.any()


@mpi_programs.on(2)
def test_a_failed_request_raises_its_error_until_it_is_complete(comm):
    if comm.rank == 0:
        comm.Send(np.zeros(4), 1)
        return
    request = comm.Irecv(np.zeros(1), 0)
    for _ in range(2):
        error = raised(MPI.Exception, lambda: until(request.Get_status, "the message"))
        assert error.Get_error_class() == MPI.ERR_TRUNCATE
        assert request
    assert raised(MPI.Exception, request.Wait).Get_error_class() == MPI.ERR_TRUNCATE
    assert not request
    request.Wait()


@mpi_programs.on(2)
def test_statuses_have_the_error_of_each_request_that_failed(comm):
    for complete in ("Waitall", "Waitsome", "Testall", "Testsome", "waitall"):
        if comm.rank == 0:
            for tag, count in enumerate([1, 4, 2, 3]):
                comm.Send(np.zeros(count), 1, tag)
        comm.Barrier()
        if comm.rank == 0:
            continue
        requests = [comm.Irecv(np.zeros(2), 0, tag) for tag in range(4)]
        statuses = [MPI.Status() for _ in requests]
        for request in requests[::2]:
            until(lambda request=request: MPI.Request.Get_status_any([request])[1], "a message")
        for request in requests[1::2]:
            raised(MPI.Exception, lambda request=request: until(request.Get_status, "a message"))
        error = raised(MPI.Exception, partial(getattr(MPI.Request, complete), requests, statuses))
        assert error.Get_error_class() == MPI.ERR_IN_STATUS
        assert not any(requests)
        assert [status.error for status in statuses] == [0, MPI.ERR_TRUNCATE] * 2
        named = [f"request {number}: MPI_ERR_TRUNCATE" in str(error) for number in range(4)]
        assert named == [False, True, False, True]


@mpi_programs.on(2)
def test_a_freed_receive_still_stores_its_data(comm):
    if comm.rank:
        comm.recv(source=0)  # only now, so that Free cannot have waited
        comm.Send(np.array([1.0, 2.0, 3.0]), 0)
        comm.Send(np.array([2.0, 3.0, 4.0]), 0, 1)
        return
    column = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    matrices = np.zeros((2, 3, 2))
    comm.Irecv([matrices[0], 1, column], 1).Free()
    receive = comm.Recv_init([matrices[1], 1, column], 1, 1)
    receive.Start()
    receive.Free()
    comm.send("go", 1)
    until(matrices[:, 2, 0].all, "the data")
    assert matrices[:, :, 0].tolist() == [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]
    assert not matrices[:, :, 1].any()


def test_irecv_takes_objects_of_the_length_that_rc_and_its_argument_say(run_program):
    text = """
        import mpi4py
        mpi4py.rc.irecv_bufsz = 100
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        for tag, length in enumerate([10, 1000, 1000, 1000]):
            comm.isend("x" * length, 0, tag)
        for tag, arguments in enumerate([(), (), (2000,), (bytearray(2000),)]):
            try:
                print(len(comm.irecv(*arguments, source=0, tag=tag).wait()))
            except MPI.Exception as error:
                print(error.Get_error_class() == MPI.ERR_TRUNCATE)
        """
    assert run_program(1, text).stdout.splitlines() == ["[0] 10", "[0] True", "[0] 1000", "[0] 1000"]


@mpi_programs.on(2)
def test_a_taken_message_without_memory_for_it_can_be_received_later(comm):
    if comm.rank == 0:
        comm.send(bytes(96 << 20), 1)
        return
    message = comm.mprobe()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), limits[1]))
    try:
        raised(MemoryError, message.recv)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    raised(TypeError, lambda: message.Recv("a string"))
    assert len(message.recv()) == 96 << 20
    assert message == MPI.MESSAGE_NULL


def test_startall_starts_all_requests_or_none(run_on_world):
    text = """
        comm = MPI.COMM_SELF
        x, y = np.zeros(4), np.zeros(4)
        column = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
        active, freed = comm.Recv_init(y, 0, 9), comm.Send_init(x, 0, 9)
        active.Start()
        freed.Free()
        for sends in ([comm.Send_init(x, 0, 1)] * 2, [comm.Send_init([x, 1, column], 0, 1)] * 2):
            send, same = sends
            for wrong in (active, freed, comm.Irecv(y, 0, 8), same):
                try:
                    MPI.Prequest.Startall([send, wrong])
                except MPI.Exception as error:
                    print(error.Get_error_class() == MPI.ERR_REQUEST, comm.Iprobe(), str(error).partition(": ")[2])
            MPI.Prequest.Startall([send])
            comm.Recv(y, 0, 1)
            send.Wait()
        """
    start = "[0] True False requests[1]: expected "
    assert run_on_world(1, text).stdout.splitlines() == 2 * [
        start + "one that is not active, got one that was started: wait for it before its next start",
        start + "a persistent request, got REQUEST_NULL, or one that was freed",
        start + "a persistent request, got one of a single operation",
        start + "another request, got requests[0] again",
    ]


# --- Buffered sends ---------------------------------------------------------------------------------------------------


@mpi_programs.on(2)
def test_threads_send_and_flush_buffered_messages_at_once(comm):
    def send(tag):
        for i in range(100):
            comm.Bsend(np.full(4, float(i)), 1, tag)
            if i % 10 == tag:
                comm.Flush_buffer()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    if comm.rank == 0:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send, range(4)))
    else:
        x = np.zeros(4)
        for tag in range(4):
            total = 0
            for _ in range(100):
                comm.Recv(x, 0, tag)
                total += x[0]
            assert total == sum(range(100))
    sys.setswitchinterval(interval)


@mpi_programs.on(2)
def test_every_flush_waits_for_the_sends_before_it(comm):
    if comm.rank == 0:
        comm.Bsend(np.zeros(1 << 20), 1)  # which waits for its receive
        with ThreadPoolExecutor(2) as pool:
            flushes = [pool.submit(comm.Flush_buffer) for _ in range(2)]
            assert not wait(flushes, 0.2).done
            comm.send("go", 1, 1)
    else:
        comm.recv(source=0, tag=1)
        comm.Recv(np.zeros(1 << 20), 0, 0)


def test_a_buffered_send_to_a_rank_that_died_fails_as_the_error_handler_says(run_on_world):
    text = """
        import os

        if comm.rank == 1:
            os._exit(3)
        codes = []
        comm.Set_errhandler(MPI.Comm.Create_errhandler(lambda comm, code: codes.append(code)))
        for call in (lambda: comm.Bsend(np.zeros(1 << 20), 1), comm.Flush_buffer, MPI.Flush_buffer):
            try:
                call()
            except MPI.Exception as error:
                print(error.Get_error_class() == MPI.ERR_PROC_FAILED, codes == [MPI.ERR_PROC_FAILED])
                break
        os._exit(3)
        """
    assert run_on_world(2, text, status=3).stdout == "[0] True True\n"


# --- User-defined operations ------------------------------------------------------------------------------------------


@mpi_programs.on(2)
def test_a_user_defined_operation_gets_all_of_a_type_that_is_longer_than_its_extent(comm):
    own = MPI.Op.Create(add, commute=True)
    column = MPI.DOUBLE.Create_vector(3, 1, 2).Create_resized(0, 8).Commit()
    x, y = np.arange(6.0).reshape(3, 2) + comm.rank, np.zeros((3, 2))
    comm.Allreduce([x, 2, column], [y, 2, column], own)
    assert y.tolist() == [[1.0, 3.0], [5.0, 7.0], [9.0, 11.0]]
    before = MPI.DOUBLE.Create_vector(3, 1, 2).Create_resized(8, 8).Commit()
    with pytest.raises((MPI.Exception, ValueError), match=r"expected|message"):
        comm.Allreduce([x, 1, before], [y, 1, before], own)


def add(x, y, _):
    np.frombuffer(y)[:] += np.frombuffer(x)


@mpi_programs.on(2)
def test_types_and_operations_may_be_freed_while_a_call_uses_them(comm):
    other = 1 - comm.rank
    matrix, received = np.arange(16.0).reshape(4, 4), np.zeros((4, 4))
    column = MPI.DOUBLE.Create_vector(4, 1, 4).Commit()
    requests = [comm.Irecv([received, 1, column], other), comm.Isend([matrix, 1, column], other)]
    column.Free()
    MPI.Request.Waitall(requests)
    assert (received[:, 0] == matrix[:, 0]).all()
    own = MPI.Op.Create(add, commute=True)
    x, y = np.ones(3), np.ones(3)
    started, persistent = comm.Iallreduce(MPI.IN_PLACE, x, own), comm.Allreduce_init(MPI.IN_PLACE, y, own)
    own.Free()
    started.Wait()
    persistent.Start()
    persistent.Wait()
    assert x.tolist() == y.tolist() == [2.0] * 3


def test_a_wait_for_an_object_that_a_signal_has_interrupted_tells_an_error_the_next_time(run_on_world):
    text = """
        import os, signal, threading

        comm.Barrier()
        if comm.rank == 0:
            request = comm.irecv(source=1)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            for _ in range(2):
                try:
                    print(request.wait())
                except (KeyboardInterrupt, MPI.Exception) as error:
                    print(type(error).__name__)
        else:
            try:
                comm.recv(source=0)
            except MPI.Exception:
                pass
        """
    assert run_on_world(2, text).stdout.splitlines() == ["[0] KeyboardInterrupt", "[0] Exception"]
