"""The command line: `ringcomm run`, `bench`, `plot`, `tune`, `algorithms`, `draw`, `simulate` and `doctor`."""

import argparse
import os
import sys
from collections.abc import Sequence

from ringcomm import __version__, bench, doctor, simulate, ways
from ringcomm.algorithms import draw
from ringcomm.bench import plot, tune
from ringcomm.errors import ArgumentError, MemoryShortage, RingcommError, unknown
from ringcomm.parallel import draw as pipelines
from ringcomm.parallel.schedule import SCHEDULES
from ringcomm.run import run

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments`, or in those of the process, and return its exit status."""
    chosen = _parser().parse_args(arguments)
    try:
        status: int = chosen.main(chosen)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # e.g. of `ringcomm bench | head`; nothing can be said any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130  # as the shell says it: 128 + SIGINT
    except (RingcommError, OSError) as error:
        # A shortage has all its figures in the line: where it was met says nothing more.
        notes = () if isinstance(error, MemoryShortage) else getattr(error, "__notes__", ())
        print(f"ringcomm {chosen.command}: {error}", *notes, sep="\n", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ringcomm", description="Collective communication for Python.")
    parser.add_argument("--version", action="version", version=f"ringcomm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    runner = commands.add_parser(
        "run",
        help="start a program on several ranks of this machine",
        usage="ringcomm run -n N [--] (script.py | -m module | program) [argument ...]",
        description="Start a program on several ranks of this machine. Each line of output begins with its rank. When "
        "a rank fails the others have 5 s to end; the exit status is that of the first failure.",
    )
    runner.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="number of ranks")
    runner.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module to run, with its arguments")
    runner.add_argument("program", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    runner.set_defaults(main=lambda chosen: _run(runner, chosen))

    benchmark = commands.add_parser(
        "bench", help="measure collectives on this machine, side by side with other libraries"
    )
    bench.add_arguments(benchmark)
    benchmark.set_defaults(main=bench.run)

    picture = commands.add_parser("plot", help="draw what `bench --json` wrote")
    plot.add_arguments(picture)
    picture.set_defaults(main=plot.run)

    tuner = commands.add_parser("tune", help="measure which settings suit this machine, for init to use from then on")
    tune.add_arguments(tuner)
    tuner.set_defaults(main=tune.run)

    table = commands.add_parser("algorithms", help="tell which way each collective takes at which size, and why")
    table.add_argument("-n", "--ranks", type=int, default=2, metavar="N", help="default: 2")
    table.set_defaults(main=lambda chosen: ways.main(chosen.ranks))

    sketch = commands.add_parser("draw", help="draw the schedule of an algorithm, or of a pipeline")
    draw.add_arguments(sketch)
    pipelines.add_arguments(sketch)
    sketch.set_defaults(main=_draw)

    simulator = commands.add_parser("simulate", help="tell what each algorithm would take on many machines")
    simulate.add_arguments(simulator)
    simulator.set_defaults(main=simulate.run)

    check = commands.add_parser("doctor", help="check what works on this machine, and explain what does not")
    check.set_defaults(main=lambda _: doctor.main())
    return parser


def _draw(chosen: argparse.Namespace) -> int:
    known = [*draw.names(), *SCHEDULES]
    if chosen.algorithm not in known:
        raise unknown("algorithm or schedule", chosen.algorithm, known)
    pipeline = chosen.algorithm in SCHEDULES
    others = {"--collective": chosen.collective} if pipeline else {"-m": chosen.micro_batches, "-v": chosen.chunks}
    for option, value in others.items():
        if value is not None:
            kind = "the schedule of a pipeline" if pipeline else "an algorithm"
            raise ArgumentError(f"{chosen.algorithm} is {kind}, and takes no {option}")
    return pipelines.run(chosen) if pipeline else draw.run(chosen)


def _run(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> int:
    command = ["-m", *chosen.module] if chosen.module else chosen.program
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        parser.error("nothing to run")
    return run(command, chosen.ranks)
