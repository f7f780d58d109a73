"""`ringcomm trace`: read the traces of all ranks of a job."""

import argparse
import json
from pathlib import Path

from ringcomm.bench.rank.collectives import COLLECTIVES
from ringcomm.machine.files import write_atomic
from ringcomm.options import positive
from ringcomm.trace.chrome import events
from ringcomm.trace.dump import describe
from ringcomm.trace.entries import read
from ringcomm.trace.plot import plot
from ringcomm.trace.report import report

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read the traces that the ranks of a job have written where RINGCOMM_TRACE or comm.trace() said, and print who "
        "waited for whom, and where the time went. Or print the flight record that a failure has left where "
        "RINGCOMM_DUMP said."
    )
    parser.add_argument("path", type=Path, help="the folder of the traces, or the file of a flight record")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a trace for Perfetto or Chrome")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a timeline; needs matplotlib")
    parser.add_argument(
        "--from", dest="begin", type=float, default=0.0, metavar="S", help="leave out what ended before"
    )
    parser.add_argument("--until", type=positive, metavar="S", help="leave out what began later")


def run(arguments: argparse.Namespace) -> int:
    if arguments.path.is_file():
        print(describe(arguments.path), end="")
        return 0
    recordings = read(arguments.path)
    begin, end = arguments.begin, arguments.until or float("inf")
    for each in recordings:
        each.calls = [call for call in each.calls if call.end >= begin and call.start < end]
    if arguments.output:
        write_atomic(arguments.output, json.dumps(events(recordings)).encode())
    if arguments.plot:
        plot(recordings, arguments.plot)
    print(report(recordings, _bus_factor), end="")
    return 0


def _bus_factor(name: str, ranks: int) -> float:
    return COLLECTIVES[name].bus_factor(ranks) if name in COLLECTIVES else 1.0
