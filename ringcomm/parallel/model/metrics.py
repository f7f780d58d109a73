"""Metrics of training steps: loss, gradient norm, tokens per second, model FLOPs utilization, exposed communication."""

import threading
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn

from ringcomm.parallel.collectives import all_reduced
from ringcomm.parallel.experts.layer import Experts
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.sharding import Modules, as_list, expert_axes, full_shape, named_shards
from ringcomm.torch import observers
from ringcomm.torch.shared import communicator_of

__all__ = ["StepMeter", "StepMetrics", "count_parameters", "flops_per_token", "measure_peak"]


def count_parameters(chunks: Modules, grid: Grid, *, active: bool = False) -> int:
    """Return the number of parameters of the full model; with `active`, of those that a token passes, `top_k` experts.

    Communication: all-reduces of a number over `ep` and `pp`.
    """
    chunks = as_list(chunks)
    experts, passed = expert_axes(chunks), _passed(chunks) if active else {}
    counts = torch.zeros(2, dtype=torch.float64, device=grid.device)  # of this rank's experts, and of all others
    for _, parameter, spec, is_copy in named_shards(chunks):
        if not is_copy:
            size = full_shape(parameter, spec).numel()
            counts[0 if parameter in experts else 1] += size * passed.get(parameter, 1.0)
    counts[0] = all_reduced(counts[0], grid.ep)
    return round(float(all_reduced(counts.sum(), grid.pp)))


def _passed(chunks: list[nn.Module]) -> dict[nn.Parameter, float]:
    """Return the parameters of experts, each with the fraction of the experts that a token passes."""
    layers = [layer for layer in nn.ModuleList(chunks).modules() if isinstance(layer, Experts)]
    return {each: layer.top_k / layer.router.out_features for layer in layers for each in layer.experts.parameters()}


def flops_per_token(parameters: int, layers: int, hidden: int, length: int) -> int:
    """Return the FLOPs of a training step per token: 6N + 12 · L · H · S for N parameters and sequences of length S.

    After Chowdhery et al., PaLM (arXiv 2204.02311), appendix B: 2N and 4 · L · H · S forward, twice that backward.
    Masked scores count, recomputation does not. With experts, N are the active parameters (see `count_parameters`).
    """
    return 6 * parameters + 12 * layers * hidden * length


def measure_peak(grid: Grid, dtype: torch.dtype, size: int) -> float:
    """Return the FLOP/s of all ranks together, each in the best of 5 products of square matrices of this size.

    Communication: two all-reduces of a number over all ranks, the first of which lets them begin together.
    """
    x = torch.ones(size, size, dtype=dtype, device=grid.device)
    best = torch.zeros((), dtype=torch.float64, device=grid.device)
    all_reduced(best, grid.world)
    for _ in range(5):
        begin = perf_counter()
        (x @ x)[0, 0].item()  # waits for a GPU
        best = best.clamp(min=2 * size**3 / (perf_counter() - begin))
    return float(all_reduced(best, grid.world))


@dataclass(frozen=True)
class StepMetrics:
    """What a StepMeter has measured; `str` of it is a line of a log.

    Attributes:
        norm: gradient norm; None: the step was skipped
        tokens_per_second: of all replicas
        utilization: model FLOPs of these tokens, divided by those of the peak in the same time
        exposed: fraction of the time that this rank's thread spent in calls of communication, or waiting for them. None
            on other backends than ringcomm, and on GPUs, where calls return early: unknown
    """

    loss: float
    norm: float | None
    tokens_per_second: float
    utilization: float
    exposed: float | None

    def __str__(self) -> str:
        norm = "skipped" if self.norm is None else f"norm {self.norm:.2f}"
        line = f"loss {self.loss:.4f}, {norm}, {self.tokens_per_second:,.0f} tokens/s, MFU {self.utilization:.1%}"
        return line if self.exposed is None else f"{line}, exposed communication {self.exposed:.1%}"


class StepMeter:
    """Measures the steps of this thread in its `with` block, given the FLOPs per token and the peak of all ranks."""

    def __init__(self, grid: Grid, flops: int, peak: float) -> None:
        self._flops, self._peak, self._thread = flops, peak, threading.get_ident()
        self._sees_waits = grid.device.type == "cpu" and communicator_of(grid.world.group) is not None
        self._begin = self._waited = 0.0

    def __enter__(self) -> "StepMeter":
        observers.waits.append(self._record)
        self._begin = perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        observers.waits.remove(self._record)

    def read(self, loss: torch.Tensor | float, norm: torch.Tensor | float | None, tokens: int) -> StepMetrics:
        """Return the metrics of the time since the last call, in which all replicas together trained on `tokens`."""
        loss, norm = float(loss), None if norm is None else float(norm)  # waits for a GPU
        now = perf_counter()
        seconds, waited = now - self._begin, self._waited
        self._begin, self._waited = now, 0.0
        rate, exposed = tokens / seconds, waited / seconds if self._sees_waits else None
        return StepMetrics(loss, norm, rate, rate * self._flops / self._peak, exposed)

    def _record(self, seconds: float) -> None:
        if threading.get_ident() == self._thread:  # not of callbacks, which run beside it
            self._waited += seconds
