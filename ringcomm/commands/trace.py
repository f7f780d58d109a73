"""`ringcomm trace`: read the traces of all ranks of a job."""

import argparse
import json
from math import inf
from pathlib import Path

from ringcomm.bench.rank.collectives import COLLECTIVES
from ringcomm.errors import ArgumentError, refuse
from ringcomm.machine.files import write_atomic
from ringcomm.options import not_negative, output, picture, positive
from ringcomm.trace.chrome import events
from ringcomm.trace.entries import read
from ringcomm.trace.flight_files import SUFFIX as FLIGHT
from ringcomm.trace.flight_report import describe
from ringcomm.trace.plot import plot
from ringcomm.trace.recorder import SUFFIX as TRACE
from ringcomm.trace.report import plural, report

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read the traces that the ranks of a job have written where RINGCOMM_TRACE or comm.trace() said, and print who "
        "waited for whom, and where the time went. Or print the flight record that a failure has left where "
        "RINGCOMM_DUMP said."
    )
    parser.add_argument("path", type=Path, help="the folder of the traces, or the file of a flight record")
    parser.add_argument("-o", "--output", type=output, metavar="FILE", help="write a trace for Perfetto or Chrome")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw a timeline; needs matplotlib")
    parser.add_argument("--from", dest="begin", type=not_negative, metavar="S", help="leave out what ended before")
    parser.add_argument("--until", type=positive, metavar="S", help="leave out what began later")


def run(arguments: argparse.Namespace) -> int:
    if arguments.path.is_file():
        _refuse_options(arguments)
        print(describe(arguments.path), end="")
        return 0
    begin, end = arguments.begin or 0.0, arguments.until or inf
    if begin >= end:
        raise ArgumentError(f"expected --from below --until, got {begin:g} and {end:g}")
    _refuse_flight_records(arguments.path)
    recordings = read(arguments.path)
    for each in recordings:
        each.calls = [call for call in each.calls if call.end >= begin and call.start < end]
    if arguments.output:
        write_atomic(arguments.output, json.dumps(events(recordings)).encode())
    if arguments.plot:
        plot(recordings, arguments.plot)
    print(report(recordings, _bus_factor), end="")
    return 0


def _refuse_options(arguments: argparse.Namespace) -> None:
    options = {"-o": arguments.output, "--plot": arguments.plot, "--from": arguments.begin, "--until": arguments.until}
    if given := [option for option, value in options.items() if value is not None]:
        raise refuse("path", f"a folder of traces, for {' and '.join(given)}", f"the file {arguments.path}")


def _refuse_flight_records(folder: Path) -> None:
    flights = sorted(folder.glob(f"*{FLIGHT}"))
    if flights and not any(folder.glob(f"*{TRACE}")):
        found = f"{plural(len(flights), 'flight record')} in {folder}: print one by `ringcomm trace {flights[0]}`"
        raise refuse("folder", "one with traces, as RINGCOMM_TRACE makes", found)


def _bus_factor(name: str, ranks: int) -> float:
    return COLLECTIVES[name].bus_factor(ranks) if name in COLLECTIVES else 1.0
