"""Train a small GPT on real text, with data, tensor and pipeline parallelism, on ringcomm or on Gloo.

    python examples/train_gpt.py                                                              one process
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --dp 2 --pp 2              four

The text is the help topics of Python (`pydoc_data`), half a million characters; the loss is that of the next character,
in nats. It does not depend on the grid, the schedule or the backend: the batch depends only on the number of the step,
and each replica takes its share.

`--cp N` splits each sequence over N ranks, with ring attention or with `--context-parallel ulysses`.
`--experts N` puts N experts in each layer, which the replicas share with `--ep`.
`--zero 1` shares the optimizer states among the replicas, `--zero 2` the gradients too, `--zero 3` the parameters too.
`--accumulate N` adds up the gradients of N parts of each batch; `--warmup N` lets the learning rate rise and fall.
`--save FOLDER` writes a checkpoint at the end; `--resume FOLDER` continues from one, on any grid.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ringcomm.parallel import (
    DataParallel,
    GPTConfig,
    GPTStage,
    Grid,
    MixedPrecision,
    OffloadedOptimizer,
    Pipeline,
    ShardedOptimizer,
    StepMeter,
    clip_grad_norm,
    count_parameters,
    flops_per_token,
    get_rng_states,
    gpt_loss,
    gpt_stages,
    gpt_tied_weights,
    load_checkpoint,
    make_schedule,
    measure_peak,
    save_checkpoint,
    seed_ranks,
    set_rng_states,
    split_sequence,
)
from ringcomm.parallel.schedule import SCHEDULES

MAX_NORM = 1.0  # of the gradients


def main() -> None:
    options = parser()
    arguments = options.parse_args()
    if arguments.batch % (arguments.dp * arguments.accumulate * arguments.micro_batches):
        options.error("--batch: expected a multiple of --dp times --accumulate times --micro-batches")
    others = max(arguments.tp, arguments.cp, arguments.ep, arguments.chunks or 1) > 1 or "zb" in arguments.schedule
    if arguments.zero == 3 and (others or arguments.precision == "float16"):
        options.error("--zero 3: expected --dp and --pp alone, one chunk and --precision float32 or bfloat16")
    timeout = timedelta(seconds=arguments.timeout)
    start(arguments, timeout)
    sizes = {name: getattr(arguments, name) for name in ("dp", "tp", "pp", "cp", "ep")}
    grid = Grid(**sizes, device=arguments.device, timeout=timeout)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // grid.world.size))
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet, data = torch.tensor([*map(ord, text)], device=grid.device).unique(return_inverse=True)

    config = GPTConfig(
        len(alphabet), arguments.context, arguments.layers, arguments.hidden, arguments.heads,
        kv_heads=arguments.kv_heads, inner=arguments.ffn,
        dropout=arguments.dropout, sequence_parallel=arguments.sequence_parallel,
        context_parallel=arguments.context_parallel, recompute=arguments.recompute != "none" and arguments.recompute,
        experts=arguments.experts, top_k=arguments.top_k,
    )  # fmt: skip
    schedule = make_schedule(arguments.schedule, grid.pp.size, arguments.micro_batches, arguments.chunks)
    chunks = [chunk.to(grid.device) for chunk in gpt_stages(config, grid, schedule)]
    adam: Callable[..., torch.optim.Optimizer] = partial(AdamW, lr=arguments.rate)
    dtype = getattr(torch, arguments.precision)
    if arguments.offload:
        adam = partial(OffloadedOptimizer, factory=adam, folder=arguments.offload)
    tied = gpt_tied_weights(chunks, grid)
    trainer: MixedPrecision | ShardedOptimizer | FullySharded
    replicas: DataParallel | None = None
    if arguments.zero == 3:
        trainer = FullySharded(chunks, grid, adam, dtype)
        tied = gpt_tied_weights(chunks, grid)  # fully_shard has replaced the parameters
    elif arguments.zero:
        blocks = [block for chunk in chunks for block in chunk.blocks.values()]
        trainer = replicas = ShardedOptimizer(chunks, grid, adam, dtype, stage=arguments.zero, tied=tied, units=blocks)
        tied = []
    else:
        trainer = MixedPrecision(chunks, grid, adam, dtype)
        replicas = DataParallel(chunks, grid.dp_cp)
    pipeline = Pipeline(grid, chunks, schedule, gpt_loss(config, grid), data_parallel=replicas, tied=tied)
    rate = partial(rate_factor, warmup=arguments.warmup, steps=arguments.steps)
    scheduler = LambdaLR(trainer.optimizer, rate)
    saved = trainer.optimizer if isinstance(trainer, FullySharded) else trainer
    first = 0
    seed_ranks(grid, 0)  # for dropout
    if arguments.resume:
        extra = load_checkpoint(arguments.resume, chunks, saved, grid)
        first = extra["step"]
        scheduler.load_state_dict(extra["scheduler"])
        set_rng_states(extra["rng"], grid)
    if first >= arguments.steps:
        sys.exit(f"--steps: expected more than the {first} steps of the checkpoint, got {arguments.steps}")

    is_rank_0 = grid.world.rank == 0
    if is_rank_0:
        print(f"{grid} on {arguments.backend}: {len(data):,} characters of {len(alphabet)}; {schedule.name}")
    losses: list[torch.Tensor] = []  # on a GPU, reading one waits for the step
    flops = flops_per_token(count_parameters(chunks, grid), config.layers, config.hidden, arguments.context)
    peak = arguments.peak or measure_peak(grid, dtype, 8192 if arguments.device == "cuda" else 512)
    with StepMeter(grid, flops, peak) as meter:
        measured = first
        for step in range(first, arguments.steps):
            batch = sample(data, arguments.batch, arguments.context, step).chunk(grid.dp.size)[grid.dp.rank]
            parts = []
            for part in batch.chunk(arguments.accumulate):
                inputs, targets = (split_sequence(each, grid.cp) for each in (part[:, :-1], part[:, 1:]))
                parts.append(pipeline.step(inputs, targets, trainer.loss_scale / arguments.accumulate))
            losses.append(torch.stack(parts).mean())
            norm = trainer.step(MAX_NORM)
            trainer.zero_grad()
            if norm is not None:
                scheduler.step()
            done = step + 1
            if is_rank_0 and (done == arguments.steps or done % max(1, arguments.steps // 10) == 0):
                tokens = arguments.batch * arguments.context * (done - measured)
                print(f"step {done}/{arguments.steps}: {meter.read(losses[-1], norm, tokens)}")
                measured = done
    if arguments.save:
        extra = {"step": arguments.steps, "scheduler": scheduler.state_dict(), "rng": get_rng_states(grid)}
        save_checkpoint(arguments.save, chunks, saved, grid, extra)
    if is_rank_0 and arguments.plot:
        plot([loss.item() for loss in losses], first, arguments.plot)
    dist.destroy_process_group()


class FullySharded:
    """ZeRO stage 3 by torch's `fully_shard` over the replicas: parameters too are shared.

    The parameters of a block are gathered for its forward and again for its backward, and its gradients are reduced to
    shares: 3Ψ in all, once per micro-batch.
    """

    loss_scale = 1.0

    def __init__(
        self, chunks: list[GPTStage], grid: Grid, optimizer: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
    ) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # since torch 2.6

        shard = partial(fully_shard, mesh=grid.mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        for chunk in chunks:
            for part in (*chunk.blocks.values(), chunk):
                shard(part)
        self.chunks, self.grid = chunks, grid
        self.optimizer = optimizer(nn.ModuleList(chunks).parameters())

    def step(self, max_norm: float) -> torch.Tensor:
        norm = clip_grad_norm(self.chunks, self.grid, max_norm)
        self.optimizer.step()
        return norm

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def rate_factor(step: int, warmup: int, steps: int) -> float:
    """Return the factor of the learning rate: linear in the warm-up, then a cosine; without warm-up, constant."""
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2 if warmup else 1.0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backend", choices=("gloo", "nccl", "ringcomm"), default="ringcomm")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: local rank modulo the number of GPUs")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="of each operation")
    add("--dp", type=int, default=1, metavar="N", help="replicas of the model (data parallelism)")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share each layer (tensor parallelism)")
    add("--pp", type=int, default=1, metavar="N", help="pipeline stages")
    add("--cp", type=int, default=1, metavar="N", help="ranks that share each sequence (context parallelism)")
    add("--context-parallel", choices=("ring", "ulysses"), default="ring", help="attention over --cp")
    add("--experts", type=int, default=0, metavar="N", help="experts in each layer, in place of an MLP")
    add("--top-k", type=int, default=2, metavar="K", help="experts for each token")
    add("--ep", type=int, default=1, metavar="N", help="replicas that share the experts, a divisor of --dp")
    add("--schedule", choices=SCHEDULES, default="1f1b")
    add("--chunks", type=int, metavar="N", help="stages of each rank: 2 for interleaved and zbv, by default, else 1")
    add("--micro-batches", type=int, default=4, metavar="N", help="of a replica's share of a batch")
    add("--sequence-parallel", action="store_true", help="shard norms and dropout along the sequence, over --tp")
    add("--recompute", choices=("none", "selective", "sharded", "full"), default="none", help="activations in backward")
    add("--offload", type=Path, metavar="FOLDER", help="keep optimizer states in files there")
    add("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="share states, gradients, parameters among replicas")
    add("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=16, help="sequences per step, of all replicas together")
    add("--context", type=int, default=64, help="sequence length, in characters")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, metavar="N", help="heads of keys and values; by default as many")
    add("--ffn", type=int, metavar="N", help="inner size of an MLP; by default 4 times --hidden")
    add("--dropout", type=float, default=0.0, metavar="P", help="dropout probability")
    add("--accumulate", type=int, default=1, metavar="N", help="parts of a batch, each divided into --micro-batches")
    add("--rate", type=float, default=1e-3, help="learning rate")
    add("--warmup", type=int, default=0, metavar="N", help="steps until --rate, from which a cosine falls to 0")
    add("--peak", type=float, metavar="FLOP/S", help="of all ranks together, for MFU; measured by default")
    add("--save", type=Path, metavar="FOLDER", help="write a checkpoint at the end")
    add("--resume", type=Path, metavar="FOLDER", help="continue from a checkpoint, up to --steps")
    add("--plot", type=Path, metavar="FILE", help="plot the loss; needs matplotlib")
    return parser


def start(arguments: argparse.Namespace, timeout: timedelta) -> None:
    """Join the ranks of torchrun, or run as a single process."""
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("--device cuda: torch finds no GPU")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if "RANK" in os.environ:
        dist.init_process_group(arguments.backend, timeout=timeout)
    else:
        dist.init_process_group(arguments.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]


def sample(data: torch.Tensor, batch: int, context: int, step: int) -> torch.Tensor:
    """Return the sequences of a step, (batch, context + 1): inputs and next characters."""
    starts = torch.randint(len(data) - context - 1, (batch,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[start : start + context + 1] for start in starts])


def plot(losses: list[float], first: int, picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots()
    axes.plot(range(first + 1, first + 1 + len(losses)), losses)
    axes.set(xlabel="step", ylabel="loss (nats per character)", title="GPT on Python's help topics")
    axes.grid(alpha=0.3)
    figure.savefig(picture)


if __name__ == "__main__":
    main()
