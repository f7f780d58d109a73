"""The errors of ringcomm.mpi4py: error handlers, what the texts say, and how the ranks of a failed job end."""

import re

import mpi_programs
import numpy as np
import pytest
from mpi_programs import MPI

from harness.failures import raised

pytestmark = pytest.mark.slow


@mpi_programs.on(1)
def test_the_error_handler_of_a_communicator_is_asked_once_about_each_refused_call(world):
    comm, asked = world.Dup(), []
    comm.Set_errhandler(MPI.Comm.Create_errhandler(lambda comm, code: asked.append((comm.name, code))))
    comm.name = "mine"
    grid = comm.Create_cart([1])
    x, y = np.zeros(2), np.zeros(2)
    started = comm.Recv_init(y, 0)
    started.Start()
    comm.Attach_buffer(MPI.BUFFER_AUTOMATIC)
    for name, call in {
        "TAG send": lambda: comm.Send(x, 0, -5),
        "RANK send": lambda: comm.Send(x, 1),
        "RANK negative send": lambda: comm.Send(x, -7),
        "RANK ssend": lambda: comm.Ssend(x, -7),
        "RANK bsend": lambda: comm.Bsend(x, -7),
        "TAG recv": lambda: comm.Recv(x, 0, -5),
        "RANK recv": lambda: comm.Recv(x, 1),
        "RANK isend": lambda: comm.Isend(x, -7),
        "RANK irecv": lambda: comm.Irecv(x, 1),
        "TAG irecv": lambda: comm.Irecv(x, 0, -5),
        "RANK sendrecv": lambda: comm.Sendrecv(x, 0, 0, y, 1),
        "RANK send_init": lambda: comm.Send_init(x, 1),
        "RANK recv_init": lambda: comm.Recv_init(x, 1),
        "TAG recv_init": lambda: comm.Recv_init(x, 0, -5),
        "REQUEST start": started.Start,
        "TAG object": lambda: comm.send(1, 0, -5),
        "RANK started object": lambda: comm.isend(1, -7),
        "TAG received object": lambda: comm.recv(source=0, tag=-5),
        "TAG sendrecv of objects": lambda: comm.sendrecv(1, 0, -5),
        "TAG probe": lambda: comm.Probe(0, -5),
        "RANK mprobe": lambda: comm.Mprobe(1),
        "ROOT bcast": lambda: comm.Bcast(x, 1),
        "ROOT gatherv": lambda: comm.Gatherv(x, y, 1),
        "ROOT iscatterv": lambda: comm.Iscatterv(x, y, 1),
        "ROOT reduce": lambda: comm.Reduce(x, y, root=1),
        "ROOT bcast of an object": lambda: comm.bcast(1, 1),
        "OP allreduce": lambda: comm.Allreduce(x, y, MPI.BAND),
        "OP iallreduce": lambda: comm.Iallreduce(x, y, MPI.BAND).Wait(),
        "ARG split": lambda: comm.Split(-3),
        "GROUP create": lambda: comm.Create(MPI.GROUP_NULL),
        "GROUP create_group": lambda: comm.Create_group(MPI.GROUP_NULL),
        "DIMS create_cart": lambda: comm.Create_cart([2]),
        "DIMS lengths of create_cart": lambda: comm.Create_cart([-1]),
        "TOPOLOGY create_graph": lambda: comm.Create_graph([1, 2], [1, 0]),
        "RANK coords": lambda: grid.Get_coords(1),
        "ARG cart_rank": lambda: grid.Get_cart_rank([3]),
        "ARG shift": lambda: grid.Shift(1, 1),
        "ERRHANDLER null": lambda: comm.Set_errhandler(MPI.ERRHANDLER_NULL),
        "KEYVAL get": lambda: comm.Get_attr(12345),
        "KEYVAL set": lambda: comm.Set_attr(12345, 0),
        "BUFFER attach": lambda: comm.Attach_buffer(bytearray(9)),
    }.items():
        asked.clear()
        error, expected = raised(MPI.Exception, call), getattr(MPI, "ERR_" + name.split()[0])
        assert error.Get_error_class() == expected, name
        assert [code for _, code in asked] == [expected], name
        assert error.Get_error_string().partition(": ")[2], f"{name}: no text"
    started.Cancel()
    started.Wait()
    assert comm.allreduce(1) == 1


@mpi_programs.on(1)
def test_every_refusal_says_why(world):
    freed = world.Dup()
    freed.Free()
    for name, call in {
        "COMM null": MPI.COMM_NULL.Barrier,
        "COMM freed": lambda: freed.Send(np.zeros(1), 0),
        "COMM predefined": MPI.COMM_WORLD.Free,
        "REQUEST cancel": MPI.REQUEST_NULL.Cancel,
        "REQUEST free": MPI.REQUEST_NULL.Free,
        "REQUEST message": lambda: MPI.MESSAGE_NULL.Recv(np.zeros(1)),
        "DIMS dims": lambda: MPI.Compute_dims(5, [2, 0]),
        "OTHER init": MPI.Init,
    }.items():
        error = raised(MPI.Exception, call)
        assert error.Get_error_class() == getattr(MPI, "ERR_" + name.split()[0]), name
        assert ": " in str(error)


@mpi_programs.on(2)
def test_a_user_defined_handler_hears_of_errors_of_the_library_and_of_requests(comm):
    codes = []
    comm.Set_errhandler(MPI.Comm.Create_errhandler(lambda comm, code: codes.append(code)))
    if comm.rank == 0:
        for tag in (1, 2):
            comm.Send(np.zeros(4), 1, tag)
    else:
        for call in (lambda: comm.Recv(np.zeros(1), 0, 1), comm.Irecv(np.zeros(1), 0, 2).Wait):
            assert raised(MPI.Exception, call).Get_error_class() == MPI.ERR_TRUNCATE
            assert codes == [MPI.ERR_TRUNCATE]
            codes.clear()
    comm.Barrier()


@pytest.mark.parametrize(
    ("handler", "call"), [("ERRORS_ARE_FATAL", "Isend(np.zeros(1), 9)"), ("ERRORS_ABORT", "Send(np.zeros(1), -9)")]
)
def test_an_error_that_is_fatal_ends_all_ranks_with_its_code(run_on_world, handler, call):
    text = f"""
        comm.Set_errhandler(MPI.{handler})
        if comm.rank == 1:
            comm.{call}
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        comm.Barrier()
        """
    done = run_on_world(2, text, status=6)  # ERR_RANK
    assert "[1] rank 1: MPI_ERR_RANK: " in done.stderr


def test_finalize_raises_the_mismatch_of_a_dropped_request(run_on_world):
    text = """
        comm.Iallreduce(MPI.IN_PLACE, np.ones(1 + comm.rank))
        comm.Barrier()
        try:
            MPI.Finalize()
        except MPI.Exception as error:
            print(str(error).replace("\\n", ""), MPI.Is_finalized())
        """
    lines = run_on_world(2, text).stdout.splitlines()
    assert len(lines) == 2
    assert all("rank 1: all_reduce(float64 x 2, sum)" in line and line.endswith(" True") for line in lines)


def test_abort_ends_all_ranks_with_its_code(run_on_world):
    text = """
        if comm.rank == 1:
            comm.Abort(7)
        try:
            comm.recv(source=1)
        except MPI.Exception as error:
            print(error.Get_error_class() == MPI.ERR_PROC_ABORTED, error)
            raise
        """
    done = run_on_world(3, text, status=7)
    assert len(re.findall(r"\[[02]\] True .*rank 1 aborted: MPI_Abort\(7\)", done.stdout)) == 2


def test_an_uncaught_exception_ends_the_others_with_one_traceback_each(run_on_world):
    text = """
        comm.Barrier()
        if comm.rank == 1:
            raise KeyError("the cause")
        comm.Barrier()
        """
    done = run_on_world(3, text, status=1)
    assert done.stderr.count("Traceback") == 3
    told = re.findall(r"\[[02]\] .*MPI_ERR_PROC_ABORTED: .*rank 1 aborted: KeyError: 'the cause'", done.stderr)
    assert len(told) == 2


# --- The start of a communicator --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["[0, 1, 2]", "[2, 0, 1]"])
def test_a_group_whose_member_has_died_does_not_wait_for_it(run_on_world, order):
    text = f"""
        import os

        comm.Barrier()
        if comm.rank == 2:
            os._exit(3)
        try:
            comm.Create_group(comm.group.Incl({order}))
        except MPI.Exception as error:
            print(error.Get_error_class() == MPI.ERR_PROC_FAILED, error)
        os._exit(3)
        """
    done = run_on_world(3, text, status=3)
    assert len(re.findall(r"^\[[01]\] True", done.stdout, re.MULTILINE)) == 2
    assert "rank 2" in done.stdout


def test_a_start_has_a_limit_of_its_own(run_on_world):
    text = """
        import os, sys, time

        if comm.rank == 1:
            comm.recv()  # after the start of the group has failed
        else:
            try:
                comm.Create_group(comm.group)
            except MPI.Exception as error:
                print(error)
            comm.send("go on", 1)
        """
    done = run_on_world(2, text, RINGCOMM_START_TIMEOUT="5")  # of the world, too, on a loaded machine
    assert re.fullmatch(r"\[0\] MPI_ERR_OTHER: .*rank 1 .* 5 s.*\n", done.stdout)


def test_the_start_of_the_world_names_the_ranks_that_do_not_come(run_program, tmp_path):
    text = f"""
        import os, time
        from pathlib import Path

        path, end = Path({str(tmp_path / "failed")!r}), time.monotonic() + 20
        if os.environ["RINGCOMM_RANK"] == "0":
            try:
                from mpi4py import MPI
            except RuntimeError as error:
                print(type(error).__name__, error)
            path.touch()
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.01)
        """
    done = run_program(2, text, RINGCOMM_START_TIMEOUT="0.5")
    assert re.fullmatch(r"\[0\] Exception MPI_ERR_OTHER: .*rank 1 .*0\.5 s.*\n", done.stdout)


# --- Processes that a rank starts -------------------------------------------------------------------------------------


def test_a_process_that_a_rank_starts_is_a_world_of_its_own(run_program):
    text = """
        import subprocess, sys
        from mpi4py import MPI

        if len(sys.argv) == 1:
            for command in ([], [sys.executable, "-m", "ringcomm", "run", "-n", "2"]):
                program = [__file__, "child"] if command else [sys.executable, __file__, "child"]
                print(subprocess.run([*command, *program], check=True, capture_output=True, text=True).stdout.split())
            MPI.COMM_WORLD.Barrier()
            MPI.Finalize()
            subprocess.run([sys.executable, __file__, "child"], check=True)  # now in place of this rank
        else:
            print(f"{MPI.COMM_WORLD.allreduce(1)}of{MPI.COMM_WORLD.size}")
        """
    lines = sorted(run_program(2, text).stdout.splitlines())
    alone, job = "['1of1']", "['[0]', '2of2', '[1]', '2of2']"
    for rank in (0, 1):
        mine = [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}]")]
        assert alone in mine
        assert job in mine or job.replace("[0]", "[2]").replace("[1]", "[0]").replace("[2]", "[1]") in mine
        assert "2of2" in mine


def test_processes_of_multiprocessing_work_beside_mpi(run_program):
    text = """
        import multiprocessing
        import os
        import sys
        from mpi4py import MPI

        def square(x):
            return x * x

        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(pool.map(square, range(3)))
            key = MPI.Comm.Create_keyval(None, lambda *_: print("finalized"))
            MPI.COMM_SELF.Set_attr(key, 0)
            if (child := os.fork()) == 0:
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
            print(MPI.COMM_WORLD.allreduce(1))
        """
    lines = ["2", *["[0, 1, 4]"] * 3, "finalized"]  # once: the child leaves MPI alone
    assert sorted(run_program(2, text).stdout.splitlines()) == [f"[{rank}] {line}" for rank in (0, 1) for line in lines]
