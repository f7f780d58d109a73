"""Data, tensor, pipeline, context and expert parallelism for torch, on any backend: ringcomm, Gloo or NCCL.

The package has no global state: you pass a `Grid` of ranks to models and layers.
"""

from ringcomm.parallel.activations import offload_activations, sharded_checkpoint
from ringcomm.parallel.attention import ParallelAttention, rotary_embedding
from ringcomm.parallel.checkpoint import load_checkpoint, save_checkpoint
from ringcomm.parallel.clip import clip_grad_norm, grad_norm
from ringcomm.parallel.compress import OneBitAdam
from ringcomm.parallel.context import (
    join_sequence,
    ring_attention,
    sequence_positions,
    split_sequence,
    ulysses_attention,
)
from ringcomm.parallel.data import DataParallel
from ringcomm.parallel.experts import Experts, set_loss_factor
from ringcomm.parallel.functional import (
    all_gather,
    all_to_all,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
)
from ringcomm.parallel.gpt import GPTConfig, GPTStage, gpt_loss, gpt_stages, gpt_tied_weights
from ringcomm.parallel.grid import Axis, Grid
from ringcomm.parallel.loss import CountedLoss, count_targets, vocab_parallel_cross_entropy
from ringcomm.parallel.metrics import StepMeter, StepMetrics, count_parameters, flops_per_token, measure_peak
from ringcomm.parallel.norm import SequenceParallelDropout, SequenceParallelLayerNorm, SequenceParallelRMSNorm
from ringcomm.parallel.offload import OffloadedOptimizer
from ringcomm.parallel.overlap import enter_linear
from ringcomm.parallel.pipeline import Pipeline
from ringcomm.parallel.precision import MixedPrecision
from ringcomm.parallel.seed import get_rng_states, rank_local_rng, seed_ranks, set_rng_states
from ringcomm.parallel.sharding import ShardSpec, collect_shard_specs, full_tensors
from ringcomm.parallel.tensor import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from ringcomm.parallel.tensor_nd import GridAttention, GridLinear, GridMLP, TensorGrid
from ringcomm.parallel.verify import check_model
from ringcomm.parallel.zero import ShardedOptimizer
from ringcomm.parameter_server import ParameterServer, Worker
from ringcomm.pipelining.schedule import PipelineSchedule, make_schedule

__all__ = [
    "Axis",
    "ColumnParallelLinear",
    "CountedLoss",
    "DataParallel",
    "Experts",
    "GPTConfig",
    "GPTStage",
    "Grid",
    "GridAttention",
    "GridLinear",
    "GridMLP",
    "MixedPrecision",
    "OffloadedOptimizer",
    "OneBitAdam",
    "ParallelAttention",
    "ParallelMLP",
    "ParameterServer",
    "Pipeline",
    "PipelineSchedule",
    "RowParallelLinear",
    "SequenceParallelDropout",
    "SequenceParallelLayerNorm",
    "SequenceParallelRMSNorm",
    "ShardSpec",
    "ShardedOptimizer",
    "StepMeter",
    "StepMetrics",
    "TensorGrid",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "Worker",
    "all_gather",
    "all_to_all",
    "check_model",
    "clip_grad_norm",
    "collect_shard_specs",
    "copy_to",
    "count_parameters",
    "count_targets",
    "enter_linear",
    "flops_per_token",
    "full_tensors",
    "gather_from",
    "get_rng_states",
    "gpt_loss",
    "gpt_stages",
    "gpt_tied_weights",
    "grad_norm",
    "join_sequence",
    "load_checkpoint",
    "make_schedule",
    "measure_peak",
    "offload_activations",
    "rank_local_rng",
    "reduce_from",
    "reduce_scatter",
    "ring_attention",
    "rotary_embedding",
    "save_checkpoint",
    "scatter_to",
    "seed_ranks",
    "sequence_positions",
    "set_loss_factor",
    "set_rng_states",
    "sharded_checkpoint",
    "split_sequence",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
]
