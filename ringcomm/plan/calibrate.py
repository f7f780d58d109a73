"""The constants of a device from measured steps.

Five constants are fitted: the shares of its data sheet that a device reaches in matrix products, elementwise kernels,
and collectives inside and between nodes, and the time in which the host launches a layer. Each bounds another part of a
step. The fit is the most likely one for errors with a Laplace distribution of 5 %, so that runs which went wrong count
little, if every constant is known within a factor of two beforehand: constants that the runs say nothing about keep
their prior value.
"""

import csv
from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.errors import ArgumentError, refuse
from ringcomm.plan.cost import Pricing
from ringcomm.plan.devices import Accelerator, Calibration
from ringcomm.plan.layout import ParallelLayout
from ringcomm.plan.model import Transformer

__all__ = ["BOUNDS", "MeasuredRun", "errors", "fit", "read_runs"]

Array = NDArray[np.float64]

NAMES = [each.name for each in fields(Calibration)]
PRIOR = Calibration(gemm=0.8, memory=0.8, launch=1e-3, inside=0.8, between=0.8)
BOUNDS = Calibration(gemm=1, memory=1, launch=1, inside=1, between=1)  # the data sheet; a second
FACTOR = 2.0  # by which a constant may differ from its prior value: a standard deviation
LAPLACE = 0.05  # expected size of an error
SMOOTH = 0.02  # errors below are squared: the Laplace distribution has no derivative at 0
LAUNCHES = (1.0, 4.0)  # times the prior value, where the fit starts: too low a launch time bounds no run, and stays
STEPS = 60  # at most; the fit of the built-in constants takes 20
CHANGE = 1e-3  # relative, for derivatives
ENOUGH = 1e-4  # improvement of the cost, which is about one for each run, at which the fit goes on

# The columns of a file of runs, and what they are called in the file of the authors of vTrain.
COLUMNS = {
    "gpus": "# GPUs",
    "batch": "global batch",
    "micro_batch": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "seq": "sequence length",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
}
OPTIONAL = ("vocab", "cp", "chunks", "zero", "kv_heads", "ffn")
SECONDS = {"seconds": 1.0, "iteration time (ms)": 1e-3}


class MeasuredRun(NamedTuple):
    """A layout and the measured seconds of its step."""

    model: Transformer
    layout: ParallelLayout
    gpus: int
    batch: int
    seconds: float


def read_runs(path: Path, *, vocab: int, recompute: str, sequence_parallel: bool) -> list[MeasuredRun]:
    """Return the runs of a CSV file.

    Its columns are those of COLUMNS, by either name, and `seconds`; `vocab`, `cp`, `chunks`, `zero`, `recompute` and
    `sequence_parallel` (0 or 1) where they differ from the arguments, or from 1, 1 and 0.

    Raises:
        ArgumentError: a column is missing, a value is not a number, or a run is impossible; with its line.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise refuse(str(path), "a header and a row for each run", "none")
    runs = []
    for line, row in enumerate(rows, 2):
        try:
            runs.append(_run(row, vocab, recompute, sequence_parallel))
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"{path}, line {line}: {error}") from None
    return runs


def _run(row: dict[str, str], vocab: int, recompute: str, sequence_parallel: bool) -> MeasuredRun:
    values = {"vocab": vocab, "cp": 1, "chunks": 1, "zero": 0}
    for name, other in [*COLUMNS.items(), *((each, each) for each in OPTIONAL)]:
        if name in row or other in row:
            values[name] = int(row.get(name) or row[other])
        elif name in COLUMNS:
            raise refuse("columns", f"{name!r} or {other!r}", ", ".join(row))
    column = next((each for each in SECONDS if each in row), None)
    if column is None:
        raise refuse("columns", " or ".join(SECONDS), ", ".join(row))
    model = Transformer(**{each.name: values.pop(each.name) for each in fields(Transformer) if each.name in values})
    gpus, batch = values.pop("gpus"), values.pop("batch")
    layout = ParallelLayout(
        recompute=row.get("recompute", recompute),
        sequence_parallel=bool(int(row.get("sequence_parallel", sequence_parallel))),
        **values,
    )
    layout.check(model, batch, gpus)
    return MeasuredRun(model, layout, gpus, batch, float(row[column]) * SECONDS[column])


def errors(runs: Sequence[MeasuredRun], device: Accelerator) -> Array:
    """Return predicted/measured - 1 of each run."""
    pricings: dict[tuple[object, ...], Pricing] = {}
    predicted = []
    for run in runs:
        key = run.model, run.gpus, run.batch
        if key not in pricings:
            pricings[key] = Pricing(run.model, device, run.gpus, run.batch)
        predicted.append(pricings[key].step(run.layout).seconds)
    return np.array(predicted) / [run.seconds for run in runs] - 1


def fit(runs: Sequence[MeasuredRun], device: Accelerator) -> Accelerator:
    """Return the device with the constants that fit the runs best."""
    starts = [replace(PRIOR, launch=PRIOR.launch * times) for times in LAUNCHES]
    _, best = min((_descend(runs, device, np.log(astuple(start))) for start in starts), key=lambda found: found[0])
    return replace(_with(device, best), basis=f"data sheet, fitted to {len(runs)} runs")


def _descend(runs: Sequence[MeasuredRun], device: Accelerator, x: Array) -> tuple[float, Array]:
    """Return the lowest cost from a start on, and its constants: Gauss-Newton with reweighted residuals.

    The constants x are logarithms, and so are the residuals r of the runs.
    """
    prior, most, width = np.log(astuple(PRIOR)), np.log(astuple(BOUNDS)), np.log(FACTOR)

    def residuals(x: Array) -> Array:
        return np.log1p(errors(runs, _with(device, x)))

    def cost(x: Array, r: Array) -> float:
        return float(SMOOTH / LAPLACE * np.hypot(1, r / SMOOTH).sum() + ((x - prior) ** 2).sum() / (2 * width**2))

    r = residuals(x)
    for _ in range(STEPS):
        slopes = np.stack([(residuals(x + CHANGE * unit) - r) / CHANGE for unit in np.eye(len(x))], 1)
        weights = 1 / (LAPLACE * SMOOTH * np.hypot(1, r / SMOOTH))
        gradient = slopes.T @ (weights * r) + (x - prior) / width**2
        curvature = slopes.T @ (weights[:, None] * slopes) + np.eye(len(x)) / width**2
        free = ~((x >= most) & (gradient < 0))  # a constant at its bound that wants to go beyond stays there
        step = np.zeros(len(x))
        step[free] = -np.linalg.solve(curvature[np.ix_(free, free)], gradient[free])
        for _ in range(10):
            nearer = np.minimum(x + step, most)
            there = residuals(nearer)
            if cost(nearer, there) < cost(x, r) - ENOUGH:
                break
            step /= 2
        else:
            break
        x, r = nearer, there
    return cost(x, r), x


def _with(device: Accelerator, logarithms: Array) -> Accelerator:
    return replace(device, calibration=Calibration(*np.exp(logarithms).tolist()))
