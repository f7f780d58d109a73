"""A worker: it runs one call after the other for the root of its pool."""

import traceback
from enum import IntEnum
from typing import NamedTuple

from ringcomm.mpi4py import MPI
from ringcomm.mpi4py.futures.preparation import MainModule, load_main

__all__ = ["Answer", "Assignment", "Outcome", "serve"]


class Assignment(NamedTuple):
    """What the root sends to a worker. Pickled parts may need the main module."""

    call: bytes  # (function, arguments, named arguments)
    preparation: bytes | None = None  # before the first call of an executor
    main: MainModule | None = None


class Outcome(IntEnum):
    """What came of an assignment."""

    RETURNED = 0
    RAISED = 1
    UNPREPARED = 2


class Answer(NamedTuple):
    """What a worker sends back."""

    outcome: Outcome
    value: bytes  # pickled: what was returned, or the exception
    trace: str = ""  # the traceback of an exception


def serve(comm: MPI.Intracomm, root: int) -> None:
    """Run the calls that the root sends until it sends None."""
    while (assignment := comm.recv(source=root)) is not None:
        comm.send(_answer(assignment), root)


def _answer(assignment: Assignment) -> Answer:
    try:
        _prepare(assignment)
    except BaseException:
        return Answer(Outcome.UNPREPARED, b"", traceback.format_exc())
    try:
        function, arguments, named = MPI.pickle.loads(assignment.call)
        return Answer(Outcome.RETURNED, MPI.pickle.dumps(function(*arguments, **named)))
    except BaseException as error:  # SystemExit, too: the caller learns of it, and the worker lives on
        return Answer(Outcome.RAISED, _pickled(error), traceback.format_exc())


def _prepare(assignment: Assignment) -> None:
    if assignment.main is not None:
        load_main(assignment.main)
    if assignment.preparation is not None:
        MPI.pickle.loads(assignment.preparation)()


def _pickled(error: BaseException) -> bytes:
    try:
        found: bytes = MPI.pickle.dumps(error)
        MPI.pickle.loads(found)  # some exceptions cannot be made again from what they pickle
    except BaseException:  # also what ends a program: the worker lives on
        found = MPI.pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return found
