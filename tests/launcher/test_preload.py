"""`ringcomm run --preload`: ranks that are forked from a process with the modules are as those that are executed."""

import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest
from elastic_programs import ELASTIC, restarted

from harness.failures import until

pytestmark = pytest.mark.slow

RUN = [sys.executable, "-m", "ringcomm", "run"]


@pytest.fixture
def program(tmp_path):
    def write(text, name="program.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return write


def run(*words, **options):
    return subprocess.run([*RUN, *words], capture_output=True, text=True, timeout=30, **options)


def printed(*words, **options):
    done = run(*words, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(done.stdout.splitlines())


SEEN = """
    import os, sys
    print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), sys.modules["__main__"].__file__)
    own = ("RINGCOMM_JOB", "RINGCOMM_JOB_SECRET", "RINGCOMM_STORE")
    print({name: value for name, value in sorted(os.environ.items()) if name not in own})
    print(sorted(os.sched_getaffinity(0)), os.getpgrp() != os.getpid(), sys.stdin.read())
    print(sys.stdout.write_through, sys.stderr.fileno(), sys.flags)
"""


def test_a_program_sees_what_it_sees_without(program, tmp_path):
    program(SEEN)
    words = ("-n", "2", "program.py", "--lr", "1")
    at = {"cwd": tmp_path, "input": "typed"}
    assert printed("--preload", "numpy", *words, **at) == printed(*words, **at)


def test_what_modules_have_put_into_the_environment_stays_there(program):
    program("import os\nos.environ['MINE'] = 'set'\n", "heavy.py")
    path = program("import os; print(os.environ['MINE'], os.environ['RINGCOMM_RANK'])")
    assert printed("--preload", "heavy", "-n", "2", path) == ["[0] set 0", "[1] set 1"]


def test_classes_of_the_program_are_pickled_also_by_threads_that_go_on(program):
    path = program(
        """
        import multiprocessing, pickle, sys, threading

        class Mine: pass

        def later():
            threading.main_thread().join()
            print(type(pickle.loads(pickle.dumps(Mine()))))

        def child(x): print(type(x))

        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=child, args=(Mine(),))
            process.start()
            process.join()
            threading.Thread(target=later).start()
        """
    )
    assert printed("--preload", "numpy", "-n", "1", path) == [
        "[0] <class '__main__.Mine'>",
        "[0] <class '__mp_main__.Mine'>",
    ]


def test_a_module_sees_what_it_sees_without(program, tmp_path):
    program(SEEN, "some_module.py")
    words = ("-n", "2", "-m", "some_module", "--lr", "1")
    at = {"cwd": tmp_path, "input": ""}
    assert printed("--preload", "numpy", *words, **at) == printed(*words, **at)


def test_modules_are_imported_once_also_those_beside_the_program(program):
    program("import os\nimported_by = os.getpid()\n", "heavy.py")
    path = program("import os, heavy\nprint(heavy.imported_by, heavy.imported_by != os.getpid())")
    lines = {line.split(maxsplit=1)[1] for line in printed("--preload", "numpy,heavy", "-n", "3", path)}
    assert len(lines) == 1
    assert lines.pop().endswith(" True")


def test_ranks_connect_and_draw_random_numbers_of_their_own(program):
    path = program(
        """
        import random, numpy as np, ringcomm
        with ringcomm.init() as comm:
            drawn = comm.all_gather(np.array([np.random.rand(), random.random()]))
            print(len({*drawn.ravel()}), comm.all_reduce(np.ones(1)))
        """
    )
    assert printed("--preload", "numpy.random,random", "-n", "3", path) == [f"[{rank}] 6 [3.]" for rank in range(3)]


def test_the_rank_that_fails_first_is_named_with_its_status(program):
    path = program("import os, time; os.environ['RINGCOMM_RANK'] == '1' and os._exit(7); time.sleep(60)")
    done = run("--preload", "numpy", "-n", "2", path)
    assert (done.returncode, done.stderr) == (7, "ringcomm run: rank 1 exited with status 7\n")


ONE_DIES = f"""{ELASTIC}
comm = ringcomm.init()
if restarts == 0:
    comm = lose(comm).grow()
complete(comm)
"""


def test_a_killed_rank_is_restarted(tmp_path):
    ended = restarted(tmp_path, ONE_DIES, 1, ranks=2, options=("--preload", "numpy"))
    assert sorted(ended.stdout.splitlines()) == ["[0] 0 0", "[1] 1 1"]
    assert ended.stderr == "ringcomm run: rank 1 was killed by SIGKILL; restarted (1 of 1)\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ValueError('no')", "ringcomm run: --preload heavy: ValueError: no\n"),
        ("import mpi4py.MPI", "--preload heavy: it imports mpi4py.MPI, which each rank has to do by itself\n"),
        ("import sys; sys.exit(3)", "the process that imports heavy for the ranks exited with status 3\n"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(program, text, words):
    program(text, "heavy.py")
    done = run("--mpi4py", "--preload", "heavy", "-n", "2", program("print('runs')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(words)


@pytest.mark.parametrize("modules", ["", "numpy,", "numpy/random"])
def test_names_that_are_none_of_modules_are_refused(modules):
    done = run("--preload", modules, "-n", "2", "-m", "this")
    assert done.returncode == 2
    assert "--preload: expected the name of a module, got '" in done.stderr


def test_an_executable_cannot_be_forked():
    done = run("--preload", "numpy", "-n", "2", "true")
    assert done.returncode == 2
    assert (
        "--preload: expected a Python program: a file that ends with .py, or -m and a module, got 'true'" in done.stderr
    )


def test_an_interrupt_is_for_the_ranks(program, tmp_path):
    path = program(
        f"""
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIGINT, lambda *_: sys.exit(5))
        pathlib.Path({str(tmp_path)!r}, "ready" + os.environ["RINGCOMM_RANK"]).touch()
        time.sleep(60)
        """
    )
    with subprocess.Popen([*RUN, "--preload", "numpy", "-n", "2", path], stderr=subprocess.PIPE, text=True) as launcher:
        until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)), "both ranks run")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(20) == 5
        assert "Traceback" not in launcher.stderr.read()


@pytest.fixture
def importing(program, tmp_path):
    """Return a module that is imported for a minute, and the process that does so, once it has begun."""
    began = tmp_path / "began"
    program(f"import os, time; open({str(began)!r}, 'w').write(str(os.getpid())); time.sleep(60)", "heavy.py")

    def process():
        until(lambda: began.exists() and began.read_text(), "the import begins")
        return int(began.read_text())

    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_while_modules_are_imported(program, importing, number):
    command = [*RUN, "--preload", "heavy", "-n", "2", program("")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        process = importing()
        launcher.send_signal(number)
        assert launcher.wait(20) == 128 + number
        assert f"ringcomm run: sent {number.name} to the ranks\n" in launcher.stderr.read()
    until(lambda: not os.path.exists(f"/proc/{process}"), "the importing process ends")


@pytest.mark.usefixtures("importing")
def test_a_node_that_imports_hears_of_the_end_of_another(program, tmp_path):
    (tmp_path / "secret").write_text("x" * 32)
    (tmp_path / "secret").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    job = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--secret-file", tmp_path / "secret"]
    fails = program(
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'began')!r}): time.sleep(0.01)\nos._exit(3)"
    )
    first = [*RUN, *job, "--node-rank", "0", "-n", "1", fails]
    second = [*RUN, *job, "--node-rank", "1", "-n", "1", "--preload", "heavy", fails]
    with subprocess.Popen(second, stderr=subprocess.PIPE, text=True) as imports:
        failing = subprocess.run(first, capture_output=True, text=True, timeout=30)
        assert (failing.returncode, imports.wait(20)) == (3, 3)
        assert "rank 0 on " in imports.stderr.read()


@pytest.mark.parametrize(
    "die",
    [
        "os.kill(heavy.PROCESS, signal.SIGKILL)",
        "os.kill(heavy.PROCESS, signal.SIGSTOP); threading.Timer(1, os.kill, (heavy.PROCESS, signal.SIGKILL)).start()",
    ],
    ids=["before", "when asked"],
)
def test_a_rank_is_restarted_though_the_importing_process_dies(program, tmp_path, die):
    program("import os\nPROCESS = os.getpid()\n", "heavy.py")
    text = f"""{ELASTIC}
import heavy
comm = ringcomm.init()
if restarts == 0:
    if rank == 0:
        {die}
    comm.barrier()
    comm = lose(comm).grow()
complete(comm)
"""
    ended = restarted(tmp_path, text, 1, ranks=2, options=("--preload", "heavy"))
    assert sorted(ended.stdout.splitlines()) == ["[0] 0 0", "[1] 1 1"]


def test_what_a_lost_rank_has_forked_ends_with_it(tmp_path):
    text = f"""{ELASTIC}
comm = ringcomm.init()
if restarts == 0:
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
        beside("child").write_text(str(child))
    comm = lose(comm).grow()
complete(comm)
if rank == 1:
    child = Path("/proc", beside("child").read_text())
    print(not child.exists() or "Z" in (child / "stat").read_text())
"""
    ended = restarted(tmp_path, text, 1, ranks=2, options=("--preload", "numpy"))
    assert sorted(ended.stdout.splitlines()) == ["[0] 0 0", "[1] 1 1", "[1] True"]
