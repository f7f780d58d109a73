"""`ringcomm run` as a user sees it."""

import array
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.slow

RINGCOMM = [sys.executable, "-m", "ringcomm"]


def with_escalation(first, second):
    """Return a command for two ranks that sends SIGTERM and SIGKILL after so many seconds, not after 5 and 7."""
    text = "import signal, sys; from ringcomm.launcher import run, supervisor; "
    text += f"supervisor.ESCALATION = ({first}, signal.SIGTERM), ({second}, signal.SIGKILL); "
    return [sys.executable, "-c", text + "sys.exit(run.run(sys.argv[1:], 2))"]


IMPATIENT = with_escalation(0.01, 0.3)


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script in which `rank` is defined, and returns its path."""

    def write(text):
        path = tmp_path / "script.py"
        start = "import os, signal, subprocess, sys, time\nrank = int(os.environ['RINGCOMM_RANK'])\n"
        path.write_text(start + textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def start():
    """Return a function that starts a command; it is killed at the end of the test."""
    started = []

    def start(*command):
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def run(*arguments, command=(*RINGCOMM, "run")):
    return subprocess.run([*command, *arguments], capture_output=True, timeout=30)


def lines(output):
    return sorted(output.decode().splitlines())


def test_lines_have_their_rank_and_stdout_and_stderr_stay_separate(script):
    done = run("-n", "3", script("print('out'); print('more'); print('err', file=sys.stderr)"))
    assert done.returncode == 0
    assert lines(done.stdout) == ["[0] more", "[0] out", "[1] more", "[1] out", "[2] more", "[2] out"]
    assert lines(done.stderr) == ["[0] err", "[1] err", "[2] err"]


@pytest.mark.parametrize("options", [(), ("--respawn", "1")])
def test_a_rank_that_ends_well_before_init_fails_that_of_the_others_at_once(script, options):
    text = """
        if rank != 2:
            import ringcomm
            ringcomm.init(timeout=25)
    """
    done = run("-n", "3", *options, script(text))
    assert done.returncode == 1
    assert b"PeerLost: rank 2 ended with status 0 before it had started" in done.stderr


@pytest.mark.parametrize("options", [(), ("--respawn", "1")])
def test_a_script_that_leaves_its_rank_running_is_no_end_of_that(script, options):
    text = """
        if rank == 0 and len(sys.argv) == 1:
            subprocess.Popen([sys.executable, __file__, "again"])
            sys.exit()
        import ringcomm
        ringcomm.init(timeout=25).barrier()
    """
    done = run("-n", "2", *options, script(text))
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_loss_of_the_process_that_ends_the_ranks_is_reported_once(script):
    text = """
        if rank == 0:
            os.kill(os.getpgrp(), signal.SIGKILL)
            print("goes on")
        time.sleep(0.1)
    """
    done = run("-n", "2", script(text))
    assert (done.returncode, lines(done.stdout)) == (0, ["[0] goes on"])
    line = "the process that ends the ranks was killed by SIGKILL: they will not end if ringcomm run is killed"
    assert lines(done.stderr) == [f"ringcomm run: {line}"]


def test_any_bytes_are_forwarded_to_the_last_line(script):
    text = script(
        r"""
        for part in (b"begin", b"ning\n", b"\xff\0\r\n", b"x" * 3_000_000 + b"\n", b"the end"):
            os.write(1, part) if len(part) < 100 else sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
        """
    )
    done = run("-n", "2", text)
    for prefix in (b"[0] ", b"[1] "):
        mine = [line.removeprefix(prefix) for line in done.stdout.split(b"\n") if line.startswith(prefix)]
        assert mine[:2] == [b"beginning", b"\xff\0\r"]
        assert b"".join(mine[2:-1]) == b"x" * 3_000_000
        assert mine[-1] == b"the end"


def test_ranks_find_their_place_and_each_run_is_its_own_job(script):
    text = script("print(*(os.environ['RINGCOMM_' + name] for name in ('RANK', 'SIZE', 'JOB', 'JOB_SECRET')))")
    jobs = set()
    for _ in range(2):
        places = [line.split()[1:] for line in lines(run("-n", "2", text).stdout)]
        assert [place[:2] for place in places] == [["0", "2"], ["1", "2"]]
        assert places[0][2:] == places[1][2:]
        jobs |= {tuple(places[0][2:])}
    assert len(jobs) == 2


def test_arguments_are_passed_unchanged(script):
    text = script("print(sys.argv[1:])")
    given = ["-n", "7", "--n", "3", "--help", "--", "-m", "two words", ""]
    for separator in ([], ["--"]):
        assert lines(run("-n", "1", *separator, text, *given).stdout) == [f"[0] {given}"]


def test_a_module_runs_with_its_arguments():
    done = run("-n", "1", "-m", "timeit", "-n", "1", "-r", "1", "pass")
    assert (done.returncode, done.stdout[:12]) == (0, b"[0] 1 loop, ")


def test_an_executable_runs():
    done = run("-n", "2", "sh", "-c", "echo rank $RINGCOMM_RANK")
    assert lines(done.stdout) == ["[0] rank 0", "[1] rank 1"]


def test_the_number_of_ranks_may_be_written_as_for_mpirun():
    assert lines(run("-np", "2", "echo", "-np", "3").stdout) == ["[0] -np 3", "[1] -np 3"]


def test_the_exit_status_is_that_of_the_first_failure(script, tmp_path):
    text = script(
        f"""
        first = {str(tmp_path / "first")!r}
        if rank == 0:
            with open(first + ".part", "w") as file:
                file.write(str(os.getpid()))
            os.rename(first + ".part", first)
            sys.exit(3)
        while not os.path.exists(first) or os.path.exists("/proc/" + open(first).read()):
            time.sleep(0.01)
        sys.exit(4)
        """
    )
    done = run("-n", "2", text)
    assert done.returncode == 3
    assert done.stderr.decode() == "ringcomm run: rank 0 exited with status 3\n"


def test_an_exit_with_status_1_ends_the_job_though_it_may_come_of_another_failure(script):
    done = run(script("if rank == 0: sys.exit(1)\ntime.sleep(1000)"), command=IMPATIENT)
    assert done.returncode == 1
    assert done.stderr.decode() == "ringcomm run: rank 0 exited with status 1\n"


def test_a_killed_rank_sets_status_128_plus_signal_and_its_output_is_not_lost(script):
    done = run("-n", "2", script("if rank == 1: print('last words'); os.kill(os.getpid(), signal.SIGSEGV)"))
    assert done.returncode == 128 + signal.SIGSEGV
    assert done.stdout == b"[1] last words\n"
    assert done.stderr.decode() == "ringcomm run: rank 1 was killed by SIGSEGV\n"


@pytest.mark.parametrize("leave_group", ["", "os.setsid()"])
def test_after_a_failure_the_others_and_their_children_get_sigterm_then_sigkill(script, tmp_path, leave_group):
    text = script(
        f"""
        ready = {str(tmp_path / "ready")!r}
        if rank == 0:
            {leave_group}
            signal.signal(signal.SIGTERM, lambda *_: print("not yet", flush=True))
            child = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 1000"])
            open(ready, "w").close()
            while True:
                time.sleep(100)
        while not os.path.exists(ready):
            time.sleep(0.01)
        sys.exit(3)
        """
    )
    done = run(text, command=IMPATIENT)  # returns when every writer of its output is dead
    assert done.returncode == 3
    assert done.stdout == b"[0] not yet\n"


def read_until(stream, count, words):
    """Read until `words` has occurred `count` times; return the lines."""
    seen = []
    while sum(words in line for line in seen) < count:
        line = stream.readline()
        assert line, f"ended after {seen}"
        seen.append(line)
    return seen


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_forwarded(script, start, number, status):
    process = start(*RINGCOMM, "run", "-n", "2", script("print('ready')\ntime.sleep(100)"))
    read_until(process.stdout, 2, b"ready")
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert err.count(b"] KeyboardInterrupt") == (2 if number == signal.SIGINT else 0)
    ours = [line for line in err.decode().splitlines() if line.startswith("ringcomm run")]
    assert ours == [f"ringcomm run: sent {signal.Signals(number).name} to the ranks"]


def test_ranks_that_ignore_a_signal_are_killed(script, start):
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    process = start(*IMPATIENT, script(f"{ignore}\nprint('ready')\ntime.sleep(100)"))
    read_until(process.stdout, 2, b"ready")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL


STUBBORN = """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"])
    print("pids", os.getpid(), child.pid)
"""


def pidfds(output):
    return [os.pidfd_open(int(pid)) for line in output for pid in re.findall(rb"\d+", line.partition(b"pids")[2])]


def all_end(fds, within):
    try:
        return all(select.select([fd], [], [], within)[0] for fd in fds)
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("leave_group", ["", "    os.setsid()"])
def test_killing_ringcomm_run_kills_the_ranks_and_their_children(script, start, leave_group):
    process = start(*RINGCOMM, "run", "-n", "2", script(leave_group + STUBBORN + "\n    time.sleep(1000)"))
    watched = pidfds(read_until(process.stdout, 2, b"pids"))
    assert len(watched) == 4
    process.kill()
    assert all_end(watched, within=2)


def test_a_program_may_create_its_own_process_group(start):
    process = start(*RINGCOMM, "run", "-n", "1", "timeout", "1000", "sh", "-c", "echo pids $$; sleep 1000")
    watched = pidfds(read_until(process.stdout, 1, b"pids"))
    process.send_signal(signal.SIGTERM)
    assert all_end(watched, within=2)
    process.communicate(timeout=30)


def test_children_of_the_ranks_die_with_them(script, start, tmp_path):
    wait = f"\n    while not os.path.exists({str(tmp_path / 'watched')!r}): time.sleep(0.01)"
    process = start(*RINGCOMM, "run", "-n", "2", script(STUBBORN + wait))
    watched = pidfds(read_until(process.stdout, 2, b"pids"))
    (tmp_path / "watched").touch()
    assert process.wait(30) == 0
    assert all_end(watched, within=2)


@pytest.fixture
def unread(script, tmp_path):
    """Both ends of a pipe, and a function that starts ranks that fill it."""
    reader, writer = os.pipe()
    started = []

    def start(text, command=IMPATIENT):
        program = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(str(os.getpid()))\n{textwrap.dedent(text)}"
        process = subprocess.Popen([*command, script(program)], stdout=writer, stderr=subprocess.PIPE)
        started.append(process)
        waiting = array.array("i", [0])
        while waiting[0] < 60_000 or sum(file.stat().st_size > 0 for file in tmp_path.glob("[01]")) < 2:
            assert process.poll() is None
            time.sleep(0.01)
            fcntl.ioctl(reader, termios.FIONREAD, waiting)
        return process, [int((tmp_path / rank).read_text()) for rank in "01"]

    yield SimpleNamespace(reader=reader, writer=writer, start=start)
    for process in started:
        process.kill()
        process.communicate()
    os.close(reader)
    os.close(writer)


def drain(reader, pause=0.0):
    """Read everything on a thread."""
    found, mine = [], os.dup(reader)

    def read():
        while data := os.read(mine, 1 << 16):
            found.append(data)
            time.sleep(pause)
        os.close(mine)

    threading.Thread(target=read, daemon=True).start()
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_while_their_output_is_not_read(unread, number):
    process, pids = unread.start("print('x' * (8 << 20))", with_escalation(1.0, 1.3))
    watched = [os.pidfd_open(pid) for pid in pids]
    process.send_signal(number)
    assert all_end(watched, within=20)
    assert process.wait(30) in (128 + number, 128 + signal.SIGTERM)  # sent soon after SIGINT
    assert process.stderr.read().startswith(b"ringcomm run: sent " + number.name.encode())


def test_all_output_reaches_a_nonblocking_pipe(unread):
    os.set_blocking(unread.writer, False)
    process, _ = unread.start("print('x' * 200_000)")
    found = drain(unread.reader, 0.01)
    assert process.wait(30) == 0
    while (size := sum(map(len, found))) < 2 * len("[0] \n") + 400_000:
        time.sleep(0.01)
    assert size == 2 * len("[0] \n") + 400_000


def test_a_signal_discards_unread_output_and_sets_the_status(unread):
    process, pids = unread.start("print('x' * 200_000)")
    while any(Path(f"/proc/{pid}").exists() for pid in pids):  # until all their output is read
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM


def test_a_slow_reader_loses_nothing_when_the_ranks_are_killed(unread):
    text = """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            print("x" * 99_995)
    """
    process, _ = unread.start(text, with_escalation(0.5, 0.6))
    process.send_signal(signal.SIGINT)
    found = drain(unread.reader, 0.08)  # takes much longer than the escalation
    assert process.wait(30) == 128 + signal.SIGKILL
    assert b" was killed by SIGKILL\n" in process.stderr.read()
    time.sleep(0.5)  # for the rest in the pipe
    printed = b"".join(found)
    assert len(printed) > 1 << 20
    assert printed.endswith(b"\n")


def test_a_failure_ends_the_others_while_their_output_is_not_read(unread, tmp_path):
    end = tmp_path / "end"
    text = f"""
        if rank == 1:
            while not os.path.exists({str(end)!r}):
                time.sleep(0.01)
            sys.exit(3)
        print('x' * (8 << 20))
    """
    process, pids = unread.start(text)
    watched = [os.pidfd_open(pid) for pid in pids]
    end.touch()
    assert process.stderr.readline() == b"ringcomm run: rank 1 exited with status 3\n"  # at once
    assert all_end(watched, within=20)
    assert process.poll() is None  # their output may still be read
    drain(unread.reader)
    assert process.wait(30) == 3


def test_the_ranks_end_when_the_output_pipe_is_closed(script, start):
    process = start(*RINGCOMM, "run", "-n", "1", script(STUBBORN + "\n    while True: print('more')"))
    watched = pidfds(read_until(process.stdout, 1, b"pids"))
    process.stdout.close()
    assert process.wait(30) == 141
    assert process.stderr.read() == b""
    assert all_end(watched, within=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "x.py"], "number of ranks: expected 1 to 1024, got 0"),
        (["-n", "100000", "x.py"], "number of ranks: expected 1 to 1024, got 100000"),
        (["-n", "2"], "nothing to run"),
        (["-n", "2", "no-such-program"], "'no-such-program' is not an executable"),
        (["-n", "2", str(Path(__file__).parents[1])], "is not an executable"),
        (["script.py"], "the following arguments are required: -n"),
        (["-n", "2", "--node-rank", "1", "x.py"], "--node-rank without --nnodes, the number of nodes"),
        (["-n", "2", "--nnodes", "2", "x.py"], "--nnodes 2 needs --node-rank, --master-addr, --master-port"),
    ],
)
def test_an_invalid_command_line_is_one_line_of_error(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
