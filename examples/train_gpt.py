"""Train a small GPT on real text, with data, tensor and pipeline parallelism, on ringcomm or on Gloo.

    python examples/train_gpt.py                                                              one process
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --dp 2 --pp 2              four

The text is the help topics of Python (`pydoc_data`), half a million characters; the loss is that of the next character,
in nats. It does not depend on the grid, the schedule or the backend: the batch depends only on the number of the step,
and each replica takes its part. Two options are exceptions: ranks draw dropout, and balance experts, for their tokens.

`--cp N` splits each sequence over N ranks, with ring attention or with `--context-parallel ulysses`.
`--experts N` puts N experts in each layer, which `--ep` divides among the replicas.
`--zero 1` shards the optimizer states over the replicas, `--zero 2` the gradients too, `--zero 3` the parameters too.
`--accumulate N` adds up the gradients of N parts of each batch; `--warmup N` lets the learning rate rise and fall.
OMP_NUM_THREADS sets the threads of a rank, which torchrun makes 1; else the ranks divide the cores.
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
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ringcomm import ArgumentError
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
from ringcomm.pipelining.schedule import SCHEDULES

MAX_NORM = 1.0  # of the gradients


def main() -> None:
    text = "\n".join(topics[name] for name in sorted(topics))
    arguments = checked(parser(), len(text))
    timeout = timedelta(seconds=arguments.timeout)
    start(arguments, timeout)
    sizes = {name: getattr(arguments, name) for name in ("dp", "tp", "pp", "cp", "ep")}
    grid = Grid(**sizes, device=arguments.device, timeout=timeout)
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it to 1
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    alphabet, data = torch.tensor([*map(ord, text)], device=grid.device).unique(return_inverse=True)

    config = GPTConfig(
        len(alphabet), arguments.context, arguments.layers, arguments.hidden, arguments.heads,
        kv_heads=arguments.kv_heads, inner=arguments.ffn,
        activation=F.silu if arguments.gated else F.gelu, gated=arguments.gated,
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
    replicas: DataParallel | ShardedOptimizer | None = None
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
        try:
            extra = load_checkpoint(arguments.resume, chunks, saved, grid)
        except ArgumentError as error:
            sys.exit(f"--resume: {error}")
        first = extra["step"]
        scheduler.load_state_dict(extra["scheduler"])
        set_rng_states(extra["rng"], grid)
    if first >= arguments.steps:
        sys.exit(f"--steps: expected more than the {first} steps of the checkpoint, got {arguments.steps}")

    is_rank_0 = grid.world.rank == 0
    if is_rank_0:
        print(f"{grid} on {arguments.backend}: {len(data):,} characters of {len(alphabet)}; {schedule.name}")
    losses: list[torch.Tensor] = []  # on a GPU, reading one waits for the step
    parameters = count_parameters(chunks, grid, active=True)
    flops = flops_per_token(parameters, config.layers, config.hidden, arguments.context)
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
    """ZeRO stage 3 by torch's `fully_shard` over the replicas: parameters too are sharded.

    The parameters of a block are gathered for its forward and again for its backward, and its gradients are reduced to
    shards: 3Ψ in all, once per micro-batch.
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

    def step(self, max_norm: float) -> torch.Tensor | None:
        norm = clip_grad_norm(self.chunks, self.grid, max_norm)
        if not norm.isfinite():
            return None
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
    add("--dp", type=count, default=1, metavar="N", help="replicas of the model (data parallelism)")
    add("--tp", type=count, default=1, metavar="N", help="shards of each layer (tensor parallelism)")
    add("--pp", type=count, default=1, metavar="N", help="pipeline stages")
    add("--cp", type=count, default=1, metavar="N", help="parts of each sequence (context parallelism)")
    add("--context-parallel", choices=("ring", "ulysses"), default="ring", help="attention over --cp")
    add("--experts", type=int, default=0, metavar="N", help="experts in each layer, in place of an MLP")
    add("--top-k", type=count, default=2, metavar="K", help="experts for each token")
    add("--ep", type=count, default=1, metavar="N", help="shards of the experts, a divisor of --dp")
    add("--schedule", choices=SCHEDULES, default="1f1b")
    add("--chunks", type=count, metavar="N", help="stages of each rank: 2 for interleaved and zbv, by default, else 1")
    add("--micro-batches", type=count, default=4, metavar="N", help="of a replica's part of a batch")
    add("--sequence-parallel", action="store_true", help="shard norms and dropout along the sequence, over --tp")
    add("--recompute", choices=("none", "selective", "sharded", "full"), default="none", help="activations in backward")
    add("--offload", type=Path, metavar="FOLDER", help="keep optimizer states in files there")
    add("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="shard states, gradients, parameters over replicas")
    add("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--steps", type=count, default=100)
    add("--batch", type=count, default=16, help="sequences per step, of all replicas together")
    add("--context", type=count, default=64, help="sequence length, in characters")
    add("--layers", type=count, default=4)
    add("--hidden", type=count, default=128)
    add("--heads", type=count, default=4)
    add("--kv-heads", type=count, metavar="N", help="heads of keys and values; by default as many")
    add("--ffn", type=count, metavar="N", help="inner size of an MLP; by default 4 times --hidden")
    add("--gated", action="store_true", help="MLPs as those of Llama, with a third matrix and SiLU")
    add("--dropout", type=float, default=0.0, metavar="P", help="dropout probability")
    add("--accumulate", type=count, default=1, metavar="N", help="parts of a batch, each divided into --micro-batches")
    add("--rate", type=float, default=1e-3, help="learning rate")
    add("--warmup", type=int, default=0, metavar="N", help="steps until --rate, from which a cosine falls to 0")
    add("--peak", type=float, metavar="FLOP/S", help="of all ranks together, for MFU; measured by default")
    add("--save", type=Path, metavar="FOLDER", help="write a checkpoint at the end")
    add("--resume", type=Path, metavar="FOLDER", help="continue from a checkpoint, up to --steps")
    add("--plot", type=Path, metavar="FILE", help="plot the loss; needs matplotlib")
    return parser


def count(text: str) -> int:
    """Return a number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def checked(options: argparse.ArgumentParser, characters: int) -> argparse.Namespace:
    """Return the arguments; exit with a sentence if they do not fit each other, the text, the world or the folders."""
    given = options.parse_args()
    world, ranks = int(os.environ.get("WORLD_SIZE", "1")), given.dp * given.tp * given.pp * given.cp
    if ranks != world:
        options.error(f"--dp, --tp, --pp, --cp: expected a product of {world}, the number of ranks, got {ranks}")
    parts = given.dp * given.accumulate * given.micro_batches
    if given.batch % parts:
        product = f"--dp · --accumulate · --micro-batches = {parts}"
        options.error(f"--batch: expected a multiple of {product}, got {given.batch}")
    if given.context > characters - 2:
        options.error(f"--context: expected at most {characters - 2}, got {given.context}")
    others = [f"--{name} {size}" for name in ("tp", "cp", "ep", "chunks") if (size := getattr(given, name) or 1) > 1]
    others += [f"--schedule {given.schedule}"] if "zb" in given.schedule else []
    others += ["--precision float16"] if given.precision == "float16" else []
    if given.zero == 3 and others:
        expected = "--dp and --pp alone, one chunk and --precision float32 or bfloat16"
        options.error(f"--zero 3: expected {expected}, got {' '.join(others)}")
    if given.offload and not given.offload.is_dir():
        options.error(f"--offload: expected a folder that exists, got {given.offload}")
    if given.save:
        try:
            given.save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            options.error(f"--save: expected a folder, got {given.save} ({error})")
    return given


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
