"""How communicators end, by Free, and the world, by Finalize: as in MPI, what was sent arrives."""

import os
import re
from pathlib import Path

import mpi_programs
import numpy as np
import pytest
from mpi_programs import MPI

from harness.failures import until

pytestmark = pytest.mark.slow


@mpi_programs.on(3)
def test_a_message_to_a_rank_that_has_freed_the_communicator_harms_nobody(world):
    """A pool that says goodbye twice, while another worker has yet to read its messages."""
    comm = world.Dup()
    if comm.rank == 0:
        comm.send("stop", 1)
        world.recv(source=1)
        for message, rank in (("work", 2), ("stop", 1), ("stop", 2)):
            comm.send(message, rank)
        world.send("now read", 2)
    elif comm.rank == 1:
        comm.recv(source=0)
        comm.Free()
        world.send("left", 0)
    else:
        world.recv(source=0)
        assert [comm.recv(source=0) for _ in range(2)] == ["work", "stop"]


def test_a_message_to_a_rank_that_is_at_its_end_harms_nobody(run_on_world):
    text = """
        import os, time

        if comm.rank == 0:
            worker = comm.recv(source=1)
            comm.send("stop", 1)
            comm.send("work", 2)
            end = time.monotonic() + 20
            while "MPI_END" not in open(f"/proc/{worker}/comm").read():  # it is in Finalize
                assert time.monotonic() < end
                time.sleep(0.001)
            for rank in (1, 2):
                comm.send("stop", rank)
            comm.Ssend(b"read", 2, 1)
        elif comm.rank == 1:
            comm.send(os.getpid(), 0)
            assert comm.recv(source=0) == "stop"
            mark = MPI.Comm.Create_keyval(delete_fn=lambda *_: open("/proc/self/comm", "w").write("MPI_END"))
            MPI.COMM_SELF.Set_attr(mark, 0)
        else:
            comm.Recv(bytearray(4), 0, 1)
            print(comm.recv(source=0), comm.recv(source=0))
        """
    assert run_on_world(3, text).stdout == "[2] work stop\n"


def test_finalize_waits_for_the_other_ranks_and_for_what_was_sent(run_on_world, tmp_path):
    text = f"""
        import time
        from pathlib import Path

        path = Path({str(tmp_path / "received")!r})
        data = np.full(1 << 18, 7, "i")
        if comm.rank == 0:
            MPI.Attach_buffer(MPI.BUFFER_AUTOMATIC)
            comm.Bsend(data, 1)
            MPI.Finalize()
            print(path.exists())
        else:
            received = np.zeros_like(data)
            comm.Recv(received)
            time.sleep(0.3)
            path.touch()
            print(received.sum() == data.sum())
        """
    assert sorted(run_on_world(2, text).stdout.splitlines()) == ["[0] True", "[1] True"]


def test_finalize_does_not_wait_for_a_rank_that_is_lost(run_on_world):
    text = """
        import os

        comm.Barrier()
        if comm.rank == 1:
            os._exit(3)
        MPI.Finalize()
        print("done")
        """
    assert sorted(run_on_world(3, text, status=3).stdout.splitlines()) == ["[0] done", "[2] done"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("comm.Recv(x, 1, 3)", "recv(at most 24 bytes, from 1) with tag 3"),
        ("comm.Irecv(x, 1).Wait()", "recv(at most 24 bytes, from 1) with any tag"),
        ("MPI.Request.Waitall([comm.Isend(x, 0), comm.Irecv(x, 1, 3)])", "recv(at most 24 bytes, from 1) with tag 3"),
        ("comm.Probe(1, 3)", "probe(from 1) with tag 3"),
        ("comm.recv(source=1)", "recv(from 1) with any tag"),
        ("comm.Recv([x, 2, MPI.DOUBLE], tag=3)", "recv(at most 16 bytes, from any) with tag 3"),
    ],
)
def test_a_wait_for_a_message_of_a_rank_in_finalize_fails(run_on_world, call, text):
    """What it had sent arrives; a receive that nobody waits for can be cancelled."""
    program = f"""
        x = np.zeros(3)
        if comm.rank == 1:
            for length in (3, 1 << 18):
                comm.Isend(np.full(length, 7.0), 0, 1)
            MPI.Finalize()
        else:
            pending = comm.Irecv(x, 1, 9)
            while "close()" not in comm._object.comm._transport.report(1):
                pass
            for length in (3, 1 << 18):
                y = np.zeros(length)
                comm.Recv(y, 1, 1)
                print(y.min())
            print(pending.Test(), comm.Iprobe(1, 3))
            pending.Cancel()
            pending.Wait()
            try:
                {call}
            except MPI.Exception as error:
                print(error)
        """
    *received, error = run_on_world(2, program).stdout.splitlines()
    assert received == ["[0] 7.0", "[0] 7.0", "[0] False False"]
    assert text in error
    any_source = "all other ranks closed the communicator during"
    assert (any_source if "any)" in text else "rank 1 closed the communicator while rank 0 needed it for") in error


def test_a_wait_on_a_communicator_that_a_rank_in_finalize_had_freed_fails(run_on_world):
    text = """
        comm = comm.Dup()
        if comm.rank == 1:
            comm.Free()
            MPI.Finalize()
        else:
            try:
                comm.Recv(np.zeros(3), 1)
            except MPI.Exception as error:
                print(error)
        """
    assert "rank 1 closed the communicator while rank 0 needed it for" in run_on_world(2, text).stdout


@mpi_programs.on(2)
def test_ranks_free_their_communicators_in_different_orders(comm):
    one, two = comm.Dup(), comm.Dup()
    for each in (one, two) if comm.rank else (two, one):
        each.Free()
    assert one == two == MPI.COMM_NULL
    assert comm.allreduce(1) == 2


@mpi_programs.on(2)
def test_requests_outlive_the_communicator(world):
    comm = world.Dup()
    data, received = np.full(1 << 18, world.rank, "i"), np.full(1 << 18, -1, "i")
    requests = [comm.Isend(data, 1 - world.rank), comm.Irecv(received, 1 - world.rank)]
    if world.rank:
        world.Barrier()
    comm.Free()
    if not world.rank:
        world.Barrier()
    MPI.Request.Waitall(requests)
    assert (received == 1 - world.rank).all()


@mpi_programs.on(2)
def test_a_communicator_that_all_have_freed_holds_nothing(comm):
    def held():
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), sum("ringcomm" in line for line in maps.splitlines())

    before = held()
    for _ in range(20):
        comm.Dup().Free()
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), "the end of the communicators")


def test_a_rank_that_waits_in_finalize_says_for_whom(run_on_world):
    """And ends after the timeout of the communicator, with the ranks that wait for it."""
    text = """
        import time

        from ringcomm.mpi4py import environment

        environment.WARN_AFTER = 1
        if comm.rank == 1:
            while comm._object.comm._transport.report(1).count("close()") < 2:
                time.sleep(0.01)
            time.sleep(0.5)  # the limit of the others ends before that of its recv
            comm.recv(source=1)
        """
    done = run_on_world(3, text, status=1, RINGCOMM_TIMEOUT="3")
    warned, *ended = [line for line in done.stderr.splitlines() if "Finalize" in line]
    text = "[0] ringcomm WARNING: Finalize: waiting for rank 1 of 3; rank 1: recv(from 1) with any tag, running for "
    assert warned.startswith(text), warned
    text = r"\[[02]\] ringcomm WARNING: Finalize: timed out: .*: it was not called by rank 1"
    assert len(ended) == 2
    assert all(re.fullmatch(text, line) for line in ended), ended


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError"])
def test_a_rank_that_ends_by_an_error_does_not_wait_in_finalize(run_on_world, end):
    text = f"""
        import sys

        if comm.rank == 0:
            {end}
        comm.recv(source=0)
        """
    run_on_world(2, text, status=3 if "3" in end else 1)


def test_finalize_waits_again_after_a_collective_that_did_not_match_it(run_on_world):
    text = """
        import time

        world = MPI.COMM_WORLD
        if world.rank == 1:
            try:
                world.allreduce(1)
            except MPI.Exception as error:
                print(error)
                world.send("later", 0)
                time.sleep(0.2)
                world.send("later", 0)
                print("sent")
        """
    printed = run_on_world(2, text).stdout
    assert "different" in printed
    assert "rank 0: close()" in printed
    assert printed.endswith("[1] sent\n")
