"""Data, tensor and pipeline parallelism for torch, in files one can read in an evening.

It speaks torch.distributed, so it runs on ringcomm, Gloo or NCCL alike. Nothing is global: what a model needs to know
of the ranks is a `Grid`, which is passed to it.

The names below are imported when they are first used, so that the schedules can be looked at where torch is missing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringcomm.parallel.checkpoint import load_checkpoint, save_checkpoint
    from ringcomm.parallel.clip import clip_grad_norm, grad_norm
    from ringcomm.parallel.data import DataParallel
    from ringcomm.parallel.functional import all_gather, copy_to, gather_from, reduce_from, reduce_scatter, scatter_to
    from ringcomm.parallel.gpt import GPTConfig, GPTStage, gpt_loss, gpt_stages, gpt_tied
    from ringcomm.parallel.grid import Axis, Grid
    from ringcomm.parallel.layout import load_full, splits, to_full
    from ringcomm.parallel.loss import vocab_parallel_cross_entropy
    from ringcomm.parallel.pipeline import Pipeline
    from ringcomm.parallel.precision import MixedPrecision
    from ringcomm.parallel.schedule import Schedule, make_schedule
    from ringcomm.parallel.seed import own, seed_ranks
    from ringcomm.parallel.tensor import (
        ColumnParallelLinear,
        ParallelAttention,
        ParallelMLP,
        RowParallelLinear,
        SplitDropout,
        SplitLayerNorm,
        VocabParallelEmbedding,
    )

__all__ = [
    "Axis",
    "ColumnParallelLinear",
    "DataParallel",
    "GPTConfig",
    "GPTStage",
    "Grid",
    "MixedPrecision",
    "ParallelAttention",
    "ParallelMLP",
    "Pipeline",
    "RowParallelLinear",
    "Schedule",
    "SplitDropout",
    "SplitLayerNorm",
    "VocabParallelEmbedding",
    "all_gather",
    "clip_grad_norm",
    "copy_to",
    "gather_from",
    "gpt_loss",
    "gpt_stages",
    "gpt_tied",
    "grad_norm",
    "load_checkpoint",
    "load_full",
    "make_schedule",
    "own",
    "reduce_from",
    "reduce_scatter",
    "save_checkpoint",
    "scatter_to",
    "seed_ranks",
    "splits",
    "to_full",
    "vocab_parallel_cross_entropy",
]

MODULES = (
    *("schedule", "grid", "functional", "layout", "seed", "tensor", "loss", "gpt", "data", "clip", "precision"),
    *("pipeline", "checkpoint"),
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in MODULES:
            try:
                found = import_module(f"{__name__}.{module}")
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                raise ModuleNotFoundError(f"{name} needs torch: pip install 'ringcomm[torch]'", name="torch") from error
            if name in found.__all__:
                globals()[name] = getattr(found, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
