"""`python -m mpi4py.run`: run a program; an uncaught exception on one rank aborts the others."""

import argparse
import runpy
import signal
import sys
import traceback
from ast import literal_eval
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from ringcomm.mpi4py import __version__, rc

__all__ = ["aborting", "main", "run_command_line"]


def main() -> None:
    """Run the program that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m mpi4py.run",
        usage="%(prog)s [options] (script.py | -m module | -c code | -) [argument ...]",
        description="Run a Python program. If it fails on one rank, the others are aborted.",
    )
    parser.add_argument("--version", action="version", version=f"mpi4py {__version__}")
    parser.add_argument("-rc", "--rc", default="", metavar="NAME=VALUE,...", help="set options of mpi4py.rc")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="module to run, and its arguments")
    parser.add_argument("-c", dest="code", nargs=argparse.REMAINDER, help="code to run, and its arguments")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script to run (- for stdin), and its arguments")
    arguments = parser.parse_args()
    command = arguments.program
    for flag, given in (("-m", arguments.module), ("-c", arguments.code)):
        if given:
            command = [flag, *given]
    if not command:
        parser.error("nothing to run: expected a script, -m and a module, -c and code, or -")
    rc(**_options(parser, arguments.rc))
    with aborting():
        run_command_line(command)


def run_command_line(command: Sequence[str] | None = None) -> None:
    """Run a script, `-m` and a module, `-c` and code, or `-` (stdin), with arguments, as Python does."""
    sys.argv[:] = sys.argv[1:] if command is None else command
    kind = sys.argv[0]
    if kind == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind in ("-c", "-"):
        code = sys.argv.pop(1) if kind == "-c" else sys.stdin.read()
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(code, "<string>" if kind == "-c" else "<stdin>", "exec"), vars(module))
    else:
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


@contextmanager
def aborting() -> Iterator[None]:
    """Abort all ranks if the body fails, or exits with another status than 0."""
    try:
        yield
    except SystemExit as stop:
        if isinstance(stop.code, int) or stop.code is None:
            _abort(stop.code or 0)
        else:
            print(stop.code, file=sys.stderr)
            _abort(1)
        raise
    except KeyboardInterrupt:
        _abort(128 + signal.SIGINT)
        raise
    except BaseException:
        if _connected():
            traceback.print_exc()
            _abort(1)
        raise


def _abort(status: int) -> None:
    if status and _connected():
        sys.stdout.flush()
        sys.stderr.flush()
        sys.modules["ringcomm.mpi4py.MPI"].COMM_WORLD.Abort(status)


def _connected() -> bool:
    mpi = sys.modules.get("ringcomm.mpi4py.MPI")  # unless the program has imported it there is nobody to abort
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


def _options(parser: argparse.ArgumentParser, text: str) -> dict[str, object]:
    options: dict[str, object] = {}
    for entry in filter(None, text.split(",")):
        name, equals, value = entry.partition("=")
        if not equals:
            parser.error(f"-rc: expected NAME=VALUE, got {entry!r}")
        options[name] = value
        with suppress(ValueError, SyntaxError):  # a string that is not quoted
            options[name] = literal_eval(value)
    return options


if __name__ == "__main__":
    main()
