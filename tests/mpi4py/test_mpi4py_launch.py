"""`ringcomm run --mpi4py`: the name mpi4py leads to ringcomm.mpi4py, and programs end as under mpi4py.run."""

import re
import subprocess
import sys
import textwrap

import pytest
from mpi_programs import run_on_open_mpi, run_on_ringcomm

pytestmark = pytest.mark.slow


def lines(done):
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


ONE_OBJECT = """
    import sys
    import mpi4py, mpi4py.MPI, mpi4py.futures, mpi4py.run
    import ringcomm.mpi4py.MPI, ringcomm.mpi4py.futures.pool, ringcomm.mpi4py.run
    from mpi4py import MPI, rc
    from mpi4py.futures.pool import MPIPoolExecutor

    assert mpi4py is ringcomm.mpi4py
    for name in ("MPI", "futures", "futures.pool", "run"):
        assert sys.modules[f"mpi4py.{name}"] is sys.modules[f"ringcomm.mpi4py.{name}"], name
    assert MPI is mpi4py.MPI
    assert MPIPoolExecutor is ringcomm.mpi4py.futures.MPIPoolExecutor
    assert sys.modules["mpi4py.rc"] is rc
    import mpi4py.rc
    assert mpi4py.rc is rc
    print(mpi4py.__version__, MPI.COMM_WORLD.Get_size())
    """


def test_every_module_is_one_object_under_both_names(run_program):
    from ringcomm import __version__

    shown = f"4.1.2+ringcomm{__version__} 2"
    assert lines(run_program(2, ONE_OBJECT)) == [f"[0] {shown}", f"[1] {shown}"]


def test_children_of_ranks_find_it_too_before_an_installed_one(run_program, tmp_path):
    """The folder of another mpi4py, further behind on the path."""
    other = tmp_path / "other" / "mpi4py"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('another mpi4py')\n")
    text = """
        import os, subprocess, sys
        import mpi4py
        if len(sys.argv) == 1:
            subprocess.run([sys.executable, __file__, "child"], check=True)
        print(mpi4py.__version__.partition("+")[2].rstrip(".0123456789"))
        """
    done = run_program(1, text, sys.executable, PYTHONPATH=str(other.parent))
    assert lines(done) == ["[0] ringcomm", "[0] ringcomm"]


def test_without_the_option_the_name_is_free(tmp_path):
    (tmp_path / "program.py").write_text("import sys\nprint(any('shim' in folder for folder in sys.path))")
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "1", tmp_path / "program.py"]
    assert lines(subprocess.run(command, capture_output=True, text=True, timeout=50)) == ["[0] False"]


def test_an_option_that_mpi4py_does_not_have_is_refused_with_the_nearest_name(run_program):
    text = """
        from mpi4py import rc
        for change in (lambda: setattr(rc, "thread_levl", "single"), lambda: rc(threads=False, finalizes=True)):
            try:
                change()
            except TypeError as error:
                print(error)
        print(rc.threads)
        """
    assert lines(run_program(1, text)) == [
        "[0] True",
        "[0] unknown option of mpi4py.rc 'finalizes'; did you mean 'finalize'?",
        "[0] unknown option of mpi4py.rc 'thread_levl'; did you mean 'thread_level'?",
    ]


# Each rank has other variables.
OPTIONS = """
    import os, warnings
    rank = int(os.environ.get("RINGCOMM_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    variables = [
        {},
        {"INITIALIZE": "no", "THREAD_LEVEL": "Multiple"},
        {"INITIALIZE": "perhaps", "THREAD_LEVEL": "1", "IRECV_BUFSZ": "-1"},
    ]
    os.environ |= {f"MPI4PY_RC_{name}": value for name, value in variables[rank].items()}
    import mpi4py, mpi4py.rc
    mpi4py.rc.thread_level = "single"
    os.environ["MPI4PY_RC_ERRORS"] = "fatal"  # read when MPI is imported

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from mpi4py import MPI
    initialized = MPI.Is_initialized()
    if not initialized:
        MPI.Init_thread()
    level, fatal = MPI.Query_thread() - MPI.THREAD_SINGLE, MPI.COMM_WORLD.Get_errhandler() == MPI.ERRORS_ARE_FATAL
    print(rank, *(each.message for each in caught), initialized, mpi4py.rc.initialize, level, fatal, sep="; ")
    """


@pytest.mark.parametrize("of", ["ringcomm", pytest.param("Open MPI", marks=pytest.mark.mpi)])
def test_variables_have_precedence_over_the_options_of_the_program(tmp_path, of):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(OPTIONS))
    done = (run_on_ringcomm if of == "ringcomm" else run_on_open_mpi)(3, str(path))
    assert sorted(re.sub(r"^\[\d\] ", "", line) for line in done.stdout.splitlines()) == [
        "0; True; True; 0; True",
        "1; False; False; 3; True",
        "2; mpi4py.rc.initialize: unexpected value 'perhaps'; mpi4py.rc.thread_level: unexpected value True; "
        "mpi4py.rc.irecv_bufsz: unexpected value '-1'; True; perhaps; 3; True",
    ], done.stderr


def test_a_program_runs_as_a_script_a_module_and_code(tmp_path):
    (tmp_path / "program.py").write_text("import sys; print(__name__, sys.argv[1:])")
    script = "-rc", "threads=False", str(tmp_path / "program.py"), "-m", "x"
    assert lines(run_on_ringcomm(1, "-m", "mpi4py", *script)) == ["[0] __main__ ['-m', 'x']"]
    assert lines(run_on_ringcomm(1, "-m", "mpi4py", "-c", "import sys; print(sys.argv)", "y")) == ["[0] ['-c', 'y']"]
    assert lines(run_on_ringcomm(1, "-m", "mpi4py", "-m", "timeit", "-n", "1", "-r", "1", "pass"))[0].startswith(
        "[0] 1 loop"
    )


FAILING = """
    import sys, time
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        {failure}
    try:
        MPI.COMM_WORLD.Barrier()
    except MPI.Exception as error:
        print(error)
        raise
    """


ENDS = {"raise KeyError('a word')": 1, "sys.exit(7)": 7, "sys.exit('a word')": 1}


@pytest.mark.parametrize(("failure", "status"), ENDS.items())
def test_a_rank_that_fails_under_mpi4py_run_aborts_the_others(run_program, failure, status):
    done = run_program(2, FAILING.format(failure=failure), "-m", "mpi4py.run", status=status)
    assert "rank 1" in done.stdout
    assert ("a word" in done.stderr) == ("a word" in failure)


def test_a_program_that_exits_with_status_0_ends_without_an_abort(run_program):
    text = "import sys\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\nsys.exit(0)"
    assert lines(run_program(2, text, "-m", "mpi4py.run")) == []


BENCHMARKS = {
    "-m mpi4py.bench ringtest -n 64 -l 3": "2 processes, 64 bytes",
    "-m mpi4py.bench pingpong -n 64 -l 3 -s 1 -o": "MPI PingPong Test",
    "-m mpi4py.futures -m mpi4py.bench futures -t 1 -l 1 -n 1": "MPIPoolExecutor - 1 workers",
}


@pytest.mark.parametrize(("command", "shown"), BENCHMARKS.items())
def test_the_benchmarks_of_mpi4py_run(command, shown):
    assert shown in "".join(lines(run_on_ringcomm(2, *command.split())))


def test_without_an_installed_mpi4py_its_modules_are_named(run_program):
    text = """
        import mpi4py

        del mpi4py.__path__[1:]  # the folder of the installed one
        for name in ("util", "bench", "typing"):
            try:
                __import__(f"mpi4py.{name}")
            except ImportError as error:
                print(error)
        """
    texts = lines(run_program(1, text))
    assert [each.split("'")[1] for each in texts] == ["mpi4py.bench", "mpi4py.typing", "mpi4py.util"]
    assert all(each.endswith("pip install mpi4py") for each in texts)
