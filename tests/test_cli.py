"""The command line as a whole; `run` has a file of its own, and so has `bench`."""

import os
import subprocess
import sys

import pytest

import ringcomm
from ringcomm import cli, doctor
from ringcomm.errors import MemoryShortage, RingcommError


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ringcomm {ringcomm.__version__}\n"


@pytest.mark.parametrize("command", ["run", "bench", "doctor"])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"ringcomm {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["dance"], ["doctor", "--loudly"], ["run", "-n", "two", "x.py"]])
def test_what_cannot_be_understood_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: ringcomm" in capsys.readouterr().err


def test_an_error_is_told_in_words_with_its_notes(monkeypatch, capsys):
    def fail():
        error = RingcommError("no luck")
        error.add_note("on rank 1 of 2")
        raise error

    monkeypatch.setattr(doctor, "main", fail)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "ringcomm doctor: no luck\non rank 1 of 2\n"


def test_a_shortage_of_memory_is_told_in_a_line(monkeypatch, capsys):
    def fail():
        error = MemoryShortage("no room")
        error.add_note("Traceback (most recent call last):")
        raise error

    monkeypatch.setattr(doctor, "main", fail)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "ringcomm doctor: no room\n"


def test_an_interrupt_ends_without_a_word(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "main", interrupt)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "ringcomm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"ringcomm {ringcomm.__version__}\n"


@pytest.mark.slow
def test_the_doctor_finds_that_ranks_work_here(capsys):
    assert cli.main(["doctor"]) == 0
    found = {line.split()[0]: line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()}
    assert found.keys() == doctor.CHECKS.keys()
    assert all(mark in ("ok", "no") for mark, _ in found.values())
    for name in ("system", "kernels", "memfd", "descriptors", "ranks", "numpy"):
        assert found[name][0] == "ok"
    assert found["cores"][1].startswith(f"{len(os.sched_getaffinity(0))} by affinity")


def test_the_doctor_goes_on_after_a_failure_and_exits_with_1_if_ranks_cannot_work(monkeypatch, capsys):
    def no_memory():
        raise RingcommError("no memory")

    monkeypatch.setattr(doctor, "launch", lambda *_, **__: no_memory())
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert "ranks        no  no memory\n" in out
    assert "numpy        ok " in out


def test_the_doctor_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"mpi4py": lambda: doctor.package("'ringcomm[mpi]'", "no-such-package")})
    assert doctor.main() == 0
    assert capsys.readouterr().out == "mpi4py       no  not installed: pip install 'ringcomm[mpi]'\n"


def test_help_is_there_where_the_system_is_another():
    text = """if True:
        import os, sys
        del os.fork, os.register_at_fork, os.sched_getaffinity  # as on Windows
        sys.modules["ringcomm._native"] = None
        from ringcomm.cli import main
        main(["tune", "--help"])
    """
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert "--ranks N" in run.stdout
