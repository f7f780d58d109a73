"""The command line: the table of commands, and what they share: usage errors and exit statuses."""

import argparse
import errno
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from linecache import getline
from traceback import extract_tb

from ringcomm import __version__
from ringcomm.errors import ArgumentError, MemoryShortage, RingcommError, unknown
from ringcomm.options import integer, one_of

__all__ = ["COMMANDS", "main", "parser_of"]

# Name → module and help. A module has add_arguments(parser) and run(arguments), which returns the exit status.
COMMANDS = {
    "run": ("commands.run", "start a program on several ranks of this machine, or of several"),
    "bench": ("bench.command", "measure collectives, here or on the ranks of a launcher, beside other libraries"),
    "plot": ("bench.plot", "plot the results of `ringcomm bench --json`"),
    "tune": (
        "bench.tuning.command",
        "measure the best thresholds for this machine, or the network, which ringcomm.init uses from then on",
    ),
    "algorithms": (
        "commands.algorithms",
        "show the path of each collective at each size here, and the algorithms between hosts",
    ),
    "draw": ("commands.draw", "draw the schedule of an algorithm or of a pipeline"),
    "simulate": ("commands.simulate", "predict the time of each algorithm on many machines"),
    "plan": ("plan.command", "find the fastest layout of a GPT on a cluster, and what its step will cost"),
    "trace": ("commands.trace", "show who waited for whom, and where the time of a recorded job went"),
    "top": ("commands.top", "show what the ranks of running jobs do"),
    "doctor": ("commands.doctor", "check what works on this machine, and explain what does not"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments`, by default those of the process, and return its exit status."""
    _open_closed_streams()
    words = sys.argv[1:] if arguments is None else [*arguments]
    first = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    command = _parse(_parser(), words[: first + 1]).command
    chosen = _parse(parser_of(command), words[first + 1 :])
    try:
        status: int = chosen.run(chosen)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as in `ringcomm bench | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as a shell reports it
    except (RingcommError, OSError) as error:
        # These messages say all; the traceback of a rank in their notes adds nothing.
        notes = () if isinstance(error, (ArgumentError, MemoryShortage)) else getattr(error, "__notes__", ())
        print(f"ringcomm {command}: {_described(error)}", *notes, sep="\n", file=sys.stderr)
        return 2


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command. Only the module of this command is imported."""
    name, description = COMMANDS[command]
    module = import_module(f"ringcomm.{name}")
    parser = argparse.ArgumentParser(
        prog=f"ringcomm {command}",
        description=f"{description[0].upper()}{description[1:]}.",
        allow_abbrev=False,  # --n after the program of `run` is its own
    )
    parser.register("type", int, integer)  # whose message says what was expected
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)
    return parser


def _open_closed_streams() -> None:
    """Replace a closed stdin, stdout or stderr (`>&-`) by /dev/null: what would be printed there is dropped.

    In this order each gets its own descriptor, so that no other file can get it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 (open until the process ends)


def _described(error: RingcommError | OSError) -> str:
    """Return the message of an error. That of a denied system call, which names no file, gets the call."""
    if isinstance(error, RingcommError) or error.filename or error.errno not in (errno.EPERM, errno.ENOSYS):
        return str(error)
    frame = extract_tb(error.__traceback__)[-1]
    line = getline(frame.filename, frame.lineno or 0)
    return f"{error}: the system denies {line[frame.colno :].partition('(')[0]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringcomm",
        usage="ringcomm [-h] [--version] COMMAND [argument ...]",
        description="Collective communication for Python.",
        epilog="commands:\n" + "\n".join(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ringcomm {__version__}")
    parser.add_argument(
        "command", metavar="COMMAND", type=one_of("command", COMMANDS), help="`ringcomm COMMAND --help` explains each"
    )
    return parser


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse `words`. An unknown option is reported first, with the usage of its command and the nearest option."""
    parser.usage = parser.format_usage().partition(": ")[2].replace("%", "%%")  # with what is required until here
    required = [action for action in parser._actions if action.required]
    for action in required:  # argparse would report a missing argument before an unknown option
        action.required = False
    _, rest = parser.parse_known_args(words)
    for action in required:
        action.required = True
    for word in rest:
        if re.match(r"-[^\d.]", word):  # not a negative number
            parser.error(str(unknown("option", word.partition("=")[0], parser._option_string_actions)))
        parser.error(f"unexpected argument {word!r}")
    return parser.parse_args(words)
