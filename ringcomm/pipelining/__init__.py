"""Pipeline schedules as data: made, checked, simulated and drawn here, executed by `ringcomm.parallel`. No torch."""

from ringcomm.pipelining.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    SCHEDULES,
    Action,
    P2PTransfer,
    PipelineSchedule,
    make_schedule,
)
from ringcomm.pipelining.simulation import Span, Timeline, simulate, timeline, transfers, validate

__all__ = [
    "BACKWARD",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "SCHEDULES",
    "Action",
    "P2PTransfer",
    "PipelineSchedule",
    "Span",
    "Timeline",
    "make_schedule",
    "simulate",
    "timeline",
    "transfers",
    "validate",
]
