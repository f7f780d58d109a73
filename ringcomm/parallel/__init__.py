"""Data, tensor, pipeline, context and expert parallelism for torch, on any backend: ringcomm, Gloo or NCCL.

The package has no global state: you pass a `Grid` of ranks to models and layers.
"""

from ringcomm.parallel.collectives import (
    all_gather,
    all_to_all,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
)
from ringcomm.parallel.context.ring import ring_attention
from ringcomm.parallel.context.sequence import join_sequence, sequence_positions, split_sequence
from ringcomm.parallel.context.ulysses import ulysses_attention
from ringcomm.parallel.data.data_parallel import DataParallel
from ringcomm.parallel.data.one_bit_adam import OneBitAdam
from ringcomm.parallel.data.zero.sharded_optimizer import ShardedOptimizer
from ringcomm.parallel.experts.layer import Experts, set_loss_factor
from ringcomm.parallel.grid import Axis, Grid
from ringcomm.parallel.inference.cache import KVCache
from ringcomm.parallel.inference.decoder import Decoder
from ringcomm.parallel.inference.generate import generate, stream_tokens
from ringcomm.parallel.inference.sampling import Sampling
from ringcomm.parallel.model.activations import offload_activations, sharded_checkpoint
from ringcomm.parallel.model.gpt import GPTConfig, GPTStage, gpt_loss, gpt_stages, gpt_tied_weights
from ringcomm.parallel.model.metrics import StepMeter, StepMetrics, count_parameters, flops_per_token, measure_peak
from ringcomm.parallel.model.verify import check_model
from ringcomm.parallel.pipeline.loss import CountedLoss, count_targets
from ringcomm.parallel.pipeline.pipeline import Pipeline
from ringcomm.parallel.sharding import ShardSpec, collect_shard_specs, full_tensors
from ringcomm.parallel.state.checkpoint import load_checkpoint, save_checkpoint
from ringcomm.parallel.state.clip import clip_grad_norm, grad_norm
from ringcomm.parallel.state.offload import OffloadedOptimizer
from ringcomm.parallel.state.precision import MixedPrecision
from ringcomm.parallel.state.seed import get_rng_states, rank_local_rng, seed_ranks, set_rng_states
from ringcomm.parallel.tensor.attention import CoreAttention, ParallelAttention, rotary_embedding
from ringcomm.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from ringcomm.parallel.tensor.layers import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from ringcomm.parallel.tensor.multidimensional import GridAttention, GridLinear, GridMLP, TensorGrid
from ringcomm.parallel.tensor.overlap import enter_linear
from ringcomm.parallel.tensor.sequence_parallel import (
    SequenceParallelDropout,
    SequenceParallelLayerNorm,
    SequenceParallelRMSNorm,
)
from ringcomm.parameter_server import ParameterServer, Worker
from ringcomm.pipelining.schedule import PipelineSchedule, make_schedule

__all__ = [
    "Axis",
    "ColumnParallelLinear",
    "CoreAttention",
    "CountedLoss",
    "DataParallel",
    "Decoder",
    "Experts",
    "GPTConfig",
    "GPTStage",
    "Grid",
    "GridAttention",
    "GridLinear",
    "GridMLP",
    "KVCache",
    "MixedPrecision",
    "OffloadedOptimizer",
    "OneBitAdam",
    "ParallelAttention",
    "ParallelMLP",
    "ParameterServer",
    "Pipeline",
    "PipelineSchedule",
    "RowParallelLinear",
    "Sampling",
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
    "generate",
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
    "stream_tokens",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
]
