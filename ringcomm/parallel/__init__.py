"""Data, tensor and pipeline parallelism for torch, on any backend of torch.distributed: ringcomm, Gloo or NCCL.

The package has no global state: you pass a `Grid` of ranks to models and layers. Names are imported on first use, so
that the schedules work without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringcomm.parallel.attention import ParallelAttention, rotary_embedding
    from ringcomm.parallel.checkpoint import load_checkpoint, save_checkpoint
    from ringcomm.parallel.clip import clip_grad_norm, grad_norm
    from ringcomm.parallel.data import DataParallel
    from ringcomm.parallel.functional import all_gather, copy_to, gather_from, reduce_from, reduce_scatter, scatter_to
    from ringcomm.parallel.gpt import GPTConfig, GPTStage, gpt_loss, gpt_stages, gpt_tied_weights
    from ringcomm.parallel.grid import Axis, Grid
    from ringcomm.parallel.loss import vocab_parallel_cross_entropy
    from ringcomm.parallel.norm import SequenceParallelDropout, SequenceParallelLayerNorm, SequenceParallelRMSNorm
    from ringcomm.parallel.pipeline import Pipeline
    from ringcomm.parallel.precision import MixedPrecision
    from ringcomm.parallel.schedule import PipelineSchedule, make_schedule
    from ringcomm.parallel.seed import rank_local_rng, seed_ranks
    from ringcomm.parallel.sharding import ShardSpec, collect_shard_specs, full_tensors
    from ringcomm.parallel.tensor import ColumnParallelLinear, ParallelMLP, RowParallelLinear, VocabParallelEmbedding
    from ringcomm.parallel.verify import check_model
    from ringcomm.parallel.zero import ZeroOptimizer

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
    "PipelineSchedule",
    "RowParallelLinear",
    "SequenceParallelDropout",
    "SequenceParallelLayerNorm",
    "SequenceParallelRMSNorm",
    "ShardSpec",
    "VocabParallelEmbedding",
    "ZeroOptimizer",
    "all_gather",
    "check_model",
    "clip_grad_norm",
    "collect_shard_specs",
    "copy_to",
    "full_tensors",
    "gather_from",
    "gpt_loss",
    "gpt_stages",
    "gpt_tied_weights",
    "grad_norm",
    "load_checkpoint",
    "make_schedule",
    "rank_local_rng",
    "reduce_from",
    "reduce_scatter",
    "rotary_embedding",
    "save_checkpoint",
    "scatter_to",
    "seed_ranks",
    "vocab_parallel_cross_entropy",
]

MODULES = (
    *("schedule", "grid", "functional", "sharding", "seed", "tensor", "attention", "norm", "loss", "gpt", "data"),
    *("clip", "precision", "pipeline", "checkpoint", "verify", "zero"),
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
