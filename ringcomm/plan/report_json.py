"""Layouts as JSON, for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ringcomm.plan.price.candidate import Candidate
from ringcomm.plan.price.traffic import bytes_sent
from ringcomm.plan.search.neighbors import near
from ringcomm.plan.search.search import SearchResult
from ringcomm.plan.train_command import grid, train_command

__all__ = ["as_json"]


def as_json(candidates: Sequence[Candidate], result: SearchResult | None = None) -> dict[str, Any]:
    """Return layouts: seconds, bytes and shares. `sent` is what a rank of the first stage sends.

    `tflops_per_gpu` are those of the model, without what is computed again. `near` has the layouts that differ from the
    best in one choice.
    """

    workload = candidates[0].workload
    found: dict[str, Any] = {
        "model": asdict(workload.model) | {"parameters": workload.model.parameters},
        "device": asdict(workload.device),
        "gpus": workload.gpus,
        "batch": workload.batch,
        "plans": [_layout(each) for each in candidates],
        "rejected": [],
    }
    if result:
        found |= {"legal": result.legal, "fitting": result.fitting}
        found["near"] = [_layout(each) for each in near(result)]
        short = [{"reason": "memory", "tp": tp, "pp": pp, "bytes": size} for (tp, pp), size in result.short.items()]
        uneven = [
            {"reason": "not divisible", axis: size} for axis, sizes in result.indivisible.items() for size in sizes
        ]
        found["rejected"] = short + uneven
    return found


def _layout(candidate: Candidate) -> dict[str, Any]:
    workload, layout, cost, memory = candidate
    return {
        **asdict(layout),
        "schedule": layout.schedule,
        "seconds": cost.seconds,
        "bytes_per_gpu": memory.total,
        "tflops_per_gpu": candidate.utilization * workload.device.flops / 1e12,
        "utilization": candidate.utilization,
        "breakdown": cost.parts._asdict(),
        "sent": bytes_sent(workload.model, layout, workload.device.element, workload.batch),
        "memory": memory._asdict(),
        "fits": candidate.fits,
        "grid": grid(layout),
        "command": train_command(workload, layout),
    }
