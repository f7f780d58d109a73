"""The command line as a whole: usage errors, exit statuses and the help of every command."""

import subprocess
import sys

import pytest

import ringcomm
from ringcomm.commands import cli, doctor
from ringcomm.errors import ArgumentError, MemoryShortage, RingcommError

OPTIONS = [
    pytest.param(command, option, id=f"{command} {option}")
    for command in cli.COMMANDS
    for option in cli.parser_of(command)._option_string_actions
    if option.startswith("--") and len(option) > 4  # shorter: a transposition is as near to others
]


def usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_an_unknown_option_gets_the_usage_of_its_command_and_the_nearest_option(command, option, capsys):
    mistyped = option[:-2] + option[-1] + option[-2]
    if mistyped == option:
        mistyped = option[:-1]
    err = usage_error([command, f"{mistyped}x"], capsys)
    assert err.startswith(f"usage: ringcomm {command} ")
    assert err.endswith(f"ringcomm {command}: error: unknown option '{mistyped}x'; did you mean '{option}'?\n")


@pytest.mark.parametrize(
    ("arguments", "usage", "error"),
    [
        ([], "ringcomm [-h]", "the following arguments are required: COMMAND"),
        (["benhc", "all_reduce"], "ringcomm [-h]", "unknown command 'benhc'; did you mean 'bench'?"),
        (["--verison"], "ringcomm [-h]", "unknown option '--verison'; did you mean '--version'?"),
        (["bench", "all_reduce", "--vss=gloo"], "ringcomm bench", "unknown option '--vss'; did you mean '--vs'?"),
        (["doctor", "-q"], "ringcomm doctor", "unknown option '-q'"),
        (["doctor", "now"], "ringcomm doctor", "unexpected argument 'now'"),
        (["doctor", "-5"], "ringcomm doctor", "unexpected argument '-5'"),
        (["run", "-n", "2"], "ringcomm run", "nothing to run"),
        (["run", "-n", "2", "--"], "ringcomm run", "nothing to run"),
        (["run", "-n", "two", "x.py"], "ringcomm run", "argument -n/-np/--ranks: expected an integer, got 'two'"),
        (["run", "x.py", "--tme"], "ringcomm run", "the following arguments are required: -n/-np/--ranks"),
    ],
)
def test_a_usage_error_names_what_is_wrong(arguments, usage, error, capsys):
    err = usage_error(arguments, capsys)
    assert err.startswith(f"usage: {usage}")
    assert error in err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert usage.startswith(f"usage: ringcomm {command}")
    assert "[-o PICTURE]" not in usage, "-o is required"


@pytest.mark.parametrize(
    ("kind", "printed"),
    [
        (RingcommError, "ringcomm doctor: no room\non rank 1\n"),
        (ArgumentError, "ringcomm doctor: no room\n"),
        (MemoryShortage, "ringcomm doctor: no room\n"),
    ],
)
def test_an_error_is_printed_with_its_notes_unless_its_message_says_all(kind, printed, monkeypatch, capsys):
    def fail(_):
        error = kind("no room")
        error.add_note("on rank 1")
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == printed


def test_an_interrupt_prints_nothing(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupt)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_python_m_ringcomm_is_the_command():
    done = subprocess.run([sys.executable, "-m", "ringcomm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"ringcomm {ringcomm.__version__}\n"


def test_help_works_on_other_systems():
    text = """if True:
        import os, sys
        del os.fork, os.register_at_fork, os.sched_getaffinity  # as on Windows
        sys.modules["ringcomm._native"] = sys.modules["resource"] = None
        from ringcomm.commands.cli import main
        main(["tune", "--help"])
    """
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert "--ranks N" in run.stdout
