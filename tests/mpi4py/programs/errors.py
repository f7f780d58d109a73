"""Errors: exceptions, their classes and texts, error handlers, and error classes of the program's own."""

import numpy as np
from mpi4py import MPI
from sections import ERRORS, comm, named, rank, refused, report, right, section, size

HANDLERS = "ERRORS_RETURN", "ERRORS_ARE_FATAL", "ERRORS_ABORT", "ERRHANDLER_NULL"


@section
def exceptions():
    try:
        comm.Send(np.zeros(1), size)
    except MPI.Exception as raised:
        error = raised
    yield "classes", (ERRORS[error.Get_error_class()], ERRORS[error.error_class], isinstance(error, RuntimeError))
    yield "codes", (error.Get_error_code() == error.error_code, MPI.Get_error_class(error.error_code) == MPI.ERR_RANK)
    yield "text", (error.Get_error_string().startswith("MPI_ERR_RANK"), error.error_string.startswith("MPI_ERR_RANK"))
    yield "compared", (error == MPI.ERR_RANK, error != MPI.ERR_TAG, bool(error), bool(MPI.Exception(MPI.SUCCESS)))
    yield "made", [MPI.Exception(code).Get_error_class() == code for code in (MPI.SUCCESS, MPI.ERR_TAG, MPI.ERR_ARG)]
    yield "as int", int(MPI.Exception(MPI.ERR_TAG)) == MPI.ERR_TAG


@section
def classes():
    yield "of another class", [n for code, n in ERRORS.items() if MPI.Get_error_class(code) != code != MPI.ERR_LASTCODE]
    known = "ERR_BUFFER ERR_COUNT ERR_TYPE ERR_TAG ERR_COMM ERR_RANK ERR_ROOT ERR_GROUP ERR_OP ERR_TRUNCATE ERR_OTHER"
    yield "names", [MPI.Get_error_string(getattr(MPI, n)).split(":")[0] for n in known.split()]
    yield "SUCCESS", (MPI.Get_error_class(MPI.SUCCESS), MPI.Get_error_string(MPI.SUCCESS).startswith("MPI_SUCCESS"))
    yield "no such code", refused(MPI.Get_error_string, -5)


@section
def own_classes():
    kind = MPI.Add_error_class()
    code = MPI.Add_error_code(kind)
    MPI.Add_error_string(kind, "a class")
    MPI.Add_error_string(code, "a code")
    yield "classes", (kind > MPI.ERR_LASTCODE, MPI.Get_error_class(code) == kind)
    yield "texts", (MPI.Get_error_string(kind), MPI.Get_error_string(code))
    yield "LASTUSEDCODE", comm.Get_attr(MPI.LASTUSEDCODE) >= code
    yield "Call_errhandler", refused(comm.Call_errhandler, code)
    error = MPI.Exception(code)
    yield "raised", (error.Get_error_code() == code, error.Get_error_class() == kind, error.Get_error_string())


@section
def handlers():
    duplicate = comm.Dup()
    yield "inherited", named(duplicate.Get_errhandler(), *HANDLERS)
    duplicate.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    yield "set", named(duplicate.Get_errhandler(), *HANDLERS)
    duplicate.Set_errhandler(MPI.ERRORS_RETURN)
    yield "ERRORS_RETURN", refused(duplicate.Send, np.zeros(1), size)
    called = []
    own = MPI.Comm.Create_errhandler(
        lambda comm, code: called.append((comm == duplicate, ERRORS[MPI.Get_error_class(code)]))
    )
    duplicate.Set_errhandler(own)
    yield "own", duplicate.Get_errhandler() == own
    yield "called", (refused(duplicate.Send, np.zeros(1), size), called[:])
    duplicate.Call_errhandler(MPI.ERR_OTHER)
    yield "Call_errhandler", called[-1]
    own.Free()
    yield "Free", (own == MPI.ERRHANDLER_NULL, refused(duplicate.Recv, np.zeros(1), size), len(called))
    duplicate.Free()
    yield "of the world", named(comm.Get_errhandler(), *HANDLERS)
    yield "no handler", refused(comm.Set_errhandler, MPI.ERRHANDLER_NULL)
    yield "handles", MPI.Errhandler.fromhandle(MPI.ERRORS_RETURN.handle) == MPI.ERRORS_RETURN


@section
def after_an_error():
    # A truncated message is an error of the receiver alone.
    outcome = None
    if rank == 0:
        for _ in range(size - 1):
            outcome = refused(comm.Recv, np.zeros(1, "i"), MPI.ANY_SOURCE, 3)
    else:
        outcome = refused(comm.Send, np.zeros(5, "i"), 0, 3)
    yield "truncated", outcome
    yield "usable", comm.sendrecv(rank, right, 4)


report()
