"""The constants of a device from measured steps.

Five constants are fitted: the shares of its data sheet that a device reaches in matrix products, elementwise kernels,
and collectives inside and between nodes, and the time in which the host launches a layer. Each bounds another part of a
step. The fit is the most likely one for errors with a Laplace distribution of 5 %, so that runs which went wrong count
little, if every constant is known within a factor of two beforehand: constants that the runs say nothing about keep
their prior value.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, fields, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.errors import ArgumentError, refuse
from ringcomm.plan.model.devices import Accelerator, Calibration
from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.transformer import Transformer
from ringcomm.plan.model.workload import Workload
from ringcomm.plan.price.step import Pricing

__all__ = ["BOUNDS", "MeasuredRun", "describe", "errors", "fit", "read_runs"]

Array = NDArray[np.float64]

PRIOR = Calibration(gemm=0.8, memory=0.8, launch=1e-3, inside=0.8, between=0.8)
BOUNDS = Calibration(gemm=1, memory=1, launch=1, inside=1, between=1)  # the data sheet; a second
FACTOR = 2.0  # by which a constant may differ from its prior value: a standard deviation
LAPLACE = 0.05  # expected size of an error
SMOOTH = 0.02  # errors below are squared: the Laplace distribution has no derivative at 0
MODEL, LAYOUT = ({each.name for each in fields(kind)} for kind in (Transformer, ParallelLayout))
FLAGS = ("gated", "sequence_parallel", "split_backward")
BASIS = "rates of the data sheet; the shares of them that programs reach are"
LAUNCHES = (1.0, 4.0)  # times the prior value, where the fit starts: too low a launch time bounds no run, and stays
STEPS = 60  # at most; the fit of the built-in constants takes 20
CHANGE = 1e-3  # relative, for derivatives
NEEDED = ("gpus", "batch", "seconds", "layers", "hidden", "heads", "seq", "tp", "pp", "dp", "micro_batch")  # columns
ENOUGH = 1e-4  # improvement of the cost, which is about one for each run, at which the fit goes on


class MeasuredRun(NamedTuple):
    """A layout and the measured seconds of its step."""

    model: Transformer
    layout: ParallelLayout
    gpus: int
    batch: int
    seconds: float


def read_runs(path: Path, *, vocab: int, recompute: str, sequence_parallel: bool) -> list[MeasuredRun]:
    """Return the runs of a CSV file.

    Its columns are `gpus`, `batch`, `seconds`, and the fields of Transformer and ParallelLayout. The arguments are the
    defaults of columns that are missing, beside the defaults of the fields.

    Raises:
        ArgumentError: a column is missing, a value is not a number, or a run is impossible; with its line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeError, csv.Error) as error:
        raise refuse(str(path), "a CSV file in UTF-8", getattr(error, "strerror", None) or error) from None
    if missing := [name for name in NEEDED if name not in columns] if columns else []:
        raise ArgumentError(f"{path}, line 1: columns: expected {', '.join(missing)}, got {', '.join(columns)}")
    known = {"gpus", "batch", "seconds", *MODEL, *LAYOUT}
    if strange := [name for name in columns if name not in known or columns.count(name) > 1]:
        raise refuse(f"{path}, line 1: columns", f"each once of {', '.join(sorted(known))}", strange[0])
    if not rows:
        raise refuse(str(path), "a header and a row for each run", "none")
    defaults = {"vocab": str(vocab), "recompute": recompute}
    runs = []
    for line, row in rows:
        # The default is for those runs that can have it, as in Megatron-LM.
        sharded = {"sequence_parallel": str(int(sequence_parallel and row["tp"] != "1"))}
        try:
            if None in row:
                raise refuse("cells", f"{len(columns)}", len(columns) + len(row[None]))
            runs.append(_run({**defaults, **sharded, **row}))
        except ValueError as error:
            raise ArgumentError(f"{path}, line {line}: {error}") from None
    return runs


def _run(row: dict[str, str]) -> MeasuredRun:
    values: dict[str, Any] = {name: row[name] for name in ("gpus", "batch", *MODEL, *LAYOUT) if name in row}
    for name in values.keys() - {"recompute"}:
        if not re.fullmatch("[01]" if name in FLAGS else r"\d{1,18}", values[name] or ""):
            raise refuse(name, "0 or 1" if name in FLAGS else "a positive integer", repr(values[name]))
        values[name] = int(values[name])
    model = Transformer(**{name: value for name, value in values.items() if name in MODEL})
    layout = ParallelLayout(**{name: value for name, value in values.items() if name in LAYOUT})
    layout.check(model, values["batch"], values["gpus"])
    with suppress(TypeError, ValueError):
        if 0 < (seconds := float(row["seconds"])) < inf:
            return MeasuredRun(model, layout, values["gpus"], values["batch"], seconds)
    raise refuse("seconds", "a positive number", repr(row["seconds"]))


def errors(runs: Sequence[MeasuredRun], device: Accelerator) -> Array:
    """Return predicted/measured - 1 of each run."""
    pricing = cache(lambda model, gpus, batch: Pricing(Workload(model, device, gpus, batch)))
    predicted = [pricing(run.model, run.gpus, run.batch).step(run.layout).seconds for run in runs]
    return np.array(predicted) / [run.seconds for run in runs] - 1


def fit(runs: Sequence[MeasuredRun], device: Accelerator) -> Accelerator:
    """Return the device with the constants that fit the runs best.

    Its error is the mean of runs that were not fitted, 0 if there are too few to tell.
    """
    fitted, unseen = _fit(runs, device), _unseen(runs, device)
    return replace(fitted, error=float(unseen.mean()) if unseen.size else 0.0)


def _fit(runs: Sequence[MeasuredRun], device: Accelerator) -> Accelerator:
    starts = [replace(PRIOR, launch=PRIOR.launch * times) for times in LAUNCHES]
    _, best = min((_descend(runs, device, np.log(astuple(start))) for start in starts), key=lambda found: found[0])
    number = f"{len(runs)} measured run{'s' * (len(runs) > 1)}"
    return replace(_with(device, best), basis=f"{BASIS} fitted to {number} with {device.attention} attention")


def _unseen(runs: Sequence[MeasuredRun], device: Accelerator) -> Array:
    """Return the sizes of the errors of every other run by the constants of the rest, if these are enough to fit."""
    if len(runs) < 2 * len(fields(Calibration)):
        return np.empty(0)
    halves = [(runs[half::2], runs[1 - half :: 2]) for half in (0, 1)]
    found: Array = np.concatenate([errors(other, _fit(half, device)) for half, other in halves])
    return abs(found)


def describe(runs: Sequence[MeasuredRun], fitted: Accelerator) -> Iterator[str]:
    """Yield the runs with their errors, the constants, and the errors of runs that were not fitted."""
    found = errors(runs, fitted)
    yield "layers hidden  gpus  tp  pp   dp micro   measured  predicted"
    for (model, layout, gpus, _, seconds), error in zip(runs, found, strict=True):
        yield (
            f"{model.layers:>6}{model.hidden:>7}{gpus:>6}{layout.tp:>4}{layout.pp:>4}{layout.dp:>5}"
            f"{layout.micro_batch:>6}{seconds:>9.3f} s{seconds * (1 + error):>9.3f} s{error:>+7.1%}"
        )
    yield ""
    for name, value in asdict(fitted.calibration).items():
        bound = getattr(BOUNDS, name)
        yield f"{name:<8}{value:>10.3g}{' s' if name == 'launch' else '  '}{'  at its bound' * (value >= bound)}"
    yield f"fitted: mean error {np.abs(found).mean():.1%}, worst {np.abs(found).max():.1%}"
    unseen = _unseen(runs, fitted)
    if unseen.size:
        yield f"not fitted (every other run, by the rest): mean error {unseen.mean():.1%}, worst {unseen.max():.1%}"
    else:
        yield f"too few runs to fit one half and predict the other: {2 * len(fields(Calibration))} are enough"


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
