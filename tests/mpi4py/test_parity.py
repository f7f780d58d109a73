"""What every call of ringcomm.mpi4py returns is what mpi4py returns on Open MPI: both run the programs in programs/."""

import ast
import difflib
import functools
import inspect

import pytest
from mpi_programs import (
    FOLDER,
    PROGRAMS,
    arguments_of,
    on_open_mpi,
    on_ringcomm,
    print_together,
    run_on_open_mpi,
    run_on_ringcomm,
)

from ringcomm.mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

# No peer; one, on both sides; an odd number, no power of two; enough for a grid of two dimensions.
SIZES = (1, 2, 3, 4)
UNSUPPORTED = "Raise NotImplementedError"  # so begins the docstring of what is not there
NOT_COMPARED = {  # calls of MPI 4.1 that Open MPI 5.0 has not
    "Flush_buffer",
    "Get_hw_resource_info",
    "Get_status_all",
    "Get_status_any",
    "Get_status_some",
    "Iflush_buffer",
    "Remove_error_class",
    "Remove_error_code",
    "Remove_error_string",
    "get_status_all",
    "get_status_any",
    "get_status_some",
}
DIFFERENT = {  # lines of Open MPI's, and what ringcomm prints instead
    "  too many: 'ERR_ARG'": "  too many: 'ERR_DIMS'",  # a more precise class
    "  no handler: 'ERR_ARG'": "  no handler: 'ERR_ERRHANDLER'",  # as above
    "  no operation of MPI's: 'ERR_OP'": "  no operation of MPI's: None",  # it takes what MPI forbids
    "  not committed: 'ERR_TYPE'": "  not committed: None",  # as above
}


@pytest.mark.parametrize("size", SIZES)
def test_the_programs_print_on_ringcomm_what_they_print_on_open_mpi(size):
    of_open_mpi = print_together(on_open_mpi, size).splitlines()
    assert {*DIFFERENT} <= {*of_open_mpi}
    expected = [DIFFERENT.get(line, line) for line in of_open_mpi]
    printed = print_together(on_ringcomm, size).splitlines()
    assert printed == expected, "\n".join(difflib.unified_diff(expected, printed, lineterm="", n=3))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("run", [run_on_ringcomm, run_on_open_mpi])
def test_abort_ends_all_ranks_with_its_code(run, size):
    assert run(size, *arguments_of("abort")).returncode == 7


def test_every_program_is_run():
    helpers = {"sections", "together", "abort", "names"}
    assert {path.stem for path in (FOLDER / "programs").glob("*.py")} - helpers == {*PROGRAMS}


# --- Every name -------------------------------------------------------------------------------------------------------


@functools.cache
def names_of_mpi4py():
    """Return pairs of each owner of public names, `MPI` or the name of a class, and its names in mpi4py."""
    lines = on_open_mpi(1, *arguments_of("names")).splitlines()
    return [(owner, names.split()) for owner, names in (line.split(":") for line in lines)]


def source(name):
    return (FOLDER / "programs" / f"{name}.py").read_text()


def owner_of(name):
    return MPI if name == "MPI" else getattr(MPI, name)


def calls():
    """Return the names of all methods and properties of mpi4py, and of its functions, that do more here than raise.

    There are no intercommunicators, whose methods raise as those of null handles do.
    """
    found = set()
    for owner, names in names_of_mpi4py():
        if owner == "Intercomm":
            continue
        values = {name: getattr(owner_of(owner), name, None) for name in names}
        if owner == "MPI":
            values = {name: value for name, value in values.items() if inspect.isroutine(value)}
        found |= {name for name, value in values.items() if not (value.__doc__ or "").startswith(UNSUPPORTED)}
    return found


def names_used(text):
    """Return the names of all attributes in the text of a program."""
    return {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}


def test_the_front_has_every_name_of_mpi4py():
    missing = [f"{owner}.{name}" for owner, names in names_of_mpi4py() for name in {*names} - {*dir(owner_of(owner))}]
    assert not sorted(missing)


def test_every_call_occurs_in_a_program():
    used = set().union(*(names_used(source(name)) for name in (*PROGRAMS, "abort")))
    assert not sorted(calls() - used - NOT_COMPARED), "in no program"
    assert not sorted(NOT_COMPARED - calls()), "said not to be compared, and not there"
    assert not sorted(NOT_COMPARED & used), "said not to be compared, and in a program"


def test_the_calls_are_those_of_mpi4py():
    assert len(calls()) > 350
    assert {"Allreduce_init", "Neighbor_alltoallw", "Waitsome", "Range_excl", "Create_subarray", "Wtick"} <= calls()
    assert not {"Spawn", "Pready", "Open_port", "with_traceback", "SUM"} & calls()
    assert names_used("x.a.b(c.d, e)\nf = 'g.h'") == {"a", "b", "d"}
