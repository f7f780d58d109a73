"""`ringcomm draw`: draw the schedule of an algorithm or of a pipeline."""

import argparse

from ringcomm.algorithms import draw as algorithms
from ringcomm.errors import ArgumentError, unknown
from ringcomm.pipelining import draw as pipelines
from ringcomm.pipelining.schedule import SCHEDULES

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    algorithms.add_arguments(parser)
    pipelines.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    name = arguments.algorithm
    known = [*algorithms.names(), *SCHEDULES]
    if name not in known:
        raise unknown("algorithm or schedule", name, known)
    if name in SCHEDULES:
        if arguments.collective is not None:
            raise ArgumentError(f"{name} is a pipeline schedule, which takes no --collective")
        return pipelines.run(arguments)
    for option, value in (("-m", arguments.micro_batches), ("-v", arguments.chunks)):
        if value is not None:
            raise ArgumentError(f"{name} is an algorithm, which takes no {option}")
    return algorithms.run(arguments)
