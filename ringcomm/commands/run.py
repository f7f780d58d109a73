"""`ringcomm run`: start a program on several ranks of this machine."""

import argparse

from ringcomm.launcher.run import run as launch

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ringcomm run -n N [--] (script.py | -m module | program) [argument ...]"
    parser.description = (
        "Start a program on several ranks of this machine. Each line of output begins with its rank. When a rank "
        "fails, the others have 5 s to end; the exit status is that of the first failure."
    )
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="module to run, and its arguments")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="program to run, and its arguments")
    parser.set_defaults(usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    command = ["-m", *arguments.module] if arguments.module else arguments.program
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        arguments.usage_error("nothing to run: expected a script, -m and a module, or a program")
    return launch(command, arguments.ranks)
