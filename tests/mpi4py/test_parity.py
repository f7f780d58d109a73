"""What every call of ringcomm.mpi4py returns is what mpi4py returns on Open MPI, on 1, 2, 3 and 5 ranks.

The programs in programs/ print what calls return, expected/ holds what they printed on Open MPI. After a change of a
program, mpi_programs.py writes those files anew.
"""

import ast
import difflib
import inspect

import pytest
from mpi_programs import (
    FOLDER,
    PROGRAMS,
    SIZES,
    arguments_of,
    on_open_mpi,
    on_ringcomm,
    print_together,
    run_on_open_mpi,
    run_on_ringcomm,
    stored,
)

from ringcomm.mpi4py import MPI

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
DIFFERENT = {  # lines of Open MPI's, and what ringcomm prints instead, by program
    "topologies": {"  too many: 'ERR_ARG'": "  too many: 'ERR_DIMS'"},  # a more precise class
    "errors": {"  no handler: 'ERR_ARG'": "  no handler: 'ERR_ERRHANDLER'"},  # as above
    "datatypes": {  # it takes what MPI forbids
        "  no operation of MPI's: 'ERR_OP'": "  no operation of MPI's: None",
        "  not committed: 'ERR_TYPE'": "  not committed: None",
    },
}


def expected(name, size):
    """Return what a program must print on ringcomm."""
    different = DIFFERENT.get(name, {})
    return "".join(different.get(line, line) + "\n" for line in stored(name, size).read_text().splitlines())


def assert_equal(expected, printed):
    changes = "\n".join(difflib.unified_diff(expected.splitlines(), printed.splitlines(), lineterm="", n=1))
    assert not changes, changes


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_on_ringcomm_what_it_printed_on_open_mpi(name, size):
    assert_equal(expected(name, size), on_ringcomm(size, *arguments_of(name)))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 5])
def test_all_programs_print_on_ringcomm_what_they_printed_on_open_mpi(size):
    assert_equal("".join(expected(name, size) for name in PROGRAMS), print_together(on_ringcomm, size))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_open_mpi_still_prints_what_is_stored(size):
    assert_equal("".join(stored(name, size).read_text() for name in PROGRAMS), print_together(on_open_mpi, size))


@pytest.mark.mpi
@pytest.mark.slow
def test_mpi4py_still_has_the_names_that_are_stored():
    assert_equal(stored("names", 1).read_text(), on_open_mpi(1, *arguments_of("names")))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("run", [run_on_ringcomm, pytest.param(run_on_open_mpi, marks=pytest.mark.mpi)])
def test_abort_ends_all_ranks_with_its_code(run, size):
    assert run(size, *arguments_of("abort")).returncode == 7


def test_every_program_is_run_and_stored():
    helpers = {"sections", "together", "abort", "names"}
    assert {path.stem for path in (FOLDER / "programs").glob("*.py")} - helpers == {*PROGRAMS}
    files = {stored(name, size) for name in PROGRAMS for size in SIZES} | {stored("names", 1)}
    assert {*(FOLDER / "expected").iterdir()} == files
    for name, lines in DIFFERENT.items():
        assert {*lines} <= {*stored(name, 2).read_text().splitlines()}


def source(name):
    return (FOLDER / "programs" / f"{name}.py").read_text()


# --- Every name -------------------------------------------------------------------------------------------------------


def names_of_mpi4py():
    """Return pairs of each owner of public names, `MPI` or the name of a class, and its names in mpi4py."""
    lines = stored("names", 1).read_text().splitlines()
    return [(owner, names.split()) for owner, names in (line.split(":") for line in lines)]


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
