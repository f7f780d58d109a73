"""`ringcomm run --preload`: ranks that are forked from a process with the modules are as those that are executed."""

import os
import signal
import subprocess
import sys
import textwrap
import time

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
    print(__name__, __file__, sys.argv[1:], sys.path[0], os.getcwd(), sys.modules["__main__"].__file__)
    own = ("RINGCOMM_JOB", "RINGCOMM_JOB_SECRET", "RINGCOMM_STORE")
    print({name: value for name, value in sorted(os.environ.items()) if name not in own})
    print(sorted(os.sched_getaffinity(0)), os.getpgrp() != os.getpid(), sys.stdin.read())
    print(sys.stdout.write_through, sys.stderr.fileno(), sys.flags)
"""


def test_a_program_sees_what_it_sees_without(program):
    words = ("-n", "2", program(SEEN), "--lr", "1")
    assert printed("--preload", "numpy", *words, input="typed") == printed(*words, input="typed")


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
    assert printed("--preload", "numpy,random", "-n", "3", path) == [f"[{rank}] 6 [3.]" for rank in range(3)]


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
        ("import sys; sys.exit(3)", "the process that imports heavy for the ranks exited with status 3\n"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(program, text, words):
    program(text, "heavy.py")
    done = run("--preload", "heavy", "-n", "2", program("print('runs')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(words)


def test_an_executable_cannot_be_forked():
    done = run("--preload", "numpy", "-n", "2", "true")
    assert done.returncode == 2
    assert (
        "--preload: expected a Python program: a file that ends with .py, or -m and a module, got 'true'" in done.stderr
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_launcher_while_modules_are_imported(program, tmp_path, number):
    program(
        f"import os, time; open({str(tmp_path / 'began')!r}, 'w').write(str(os.getpid())); time.sleep(60)", "heavy.py"
    )
    command = [*RUN, "--preload", "heavy", "-n", "2", program("")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as launcher:
        until(lambda: (tmp_path / "began").exists() and (tmp_path / "began").read_text(), "the import begins")
        begin = time.monotonic()
        launcher.send_signal(number)
        assert launcher.wait(20) == 128 + number
        assert time.monotonic() - begin < 20
    importing = int((tmp_path / "began").read_text())
    until(lambda: not os.path.exists(f"/proc/{importing}"), "the importing process ends")


def test_a_signal_is_forwarded_to_the_ranks_and_not_to_the_process_that_forks_them(program, tmp_path):
    path = program(
        f"""
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        open(os.path.join({str(tmp_path)!r}, "ready" + os.environ["RINGCOMM_RANK"]), "w").close()
        time.sleep(60)
        """
    )
    with subprocess.Popen([*RUN, "--preload", "numpy", "-n", "2", path], stderr=subprocess.PIPE, text=True) as launcher:
        until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)), "both ranks run")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(20) == 5
        assert "imports" not in launcher.stderr.read()
