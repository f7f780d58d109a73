"""Train a small GPT on real text, with data, tensor and pipeline parallelism, on ringcomm or on Gloo.

    python examples/train_gpt.py                                                              one process
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --dp 2 --pp 2              four

The text is the help topics of Python (`pydoc_data`), half a million characters; the loss is that of the next character,
in nats. It does not depend on the grid, the schedule or the backend: the batch depends only on the number of the step,
and each replica takes its share.

`--zero 1` shares the optimizer states among the replicas, `--zero 2` the gradients too, `--zero 3` the parameters too.
`--save FOLDER` writes a checkpoint at the end; `--resume FOLDER` continues from one, on any grid.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from ringcomm.parallel import (
    DataParallel,
    GPTConfig,
    GPTStage,
    Grid,
    MixedPrecision,
    Pipeline,
    ZeroOptimizer,
    clip_grad_norm,
    gpt_loss,
    gpt_stages,
    gpt_tied_weights,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
    seed_ranks,
)
from ringcomm.parallel.schedule import SCHEDULES

MAX_NORM = 1.0  # of the gradients


def main() -> None:
    options = parser()
    arguments = options.parse_args()
    if arguments.batch % (arguments.dp * arguments.micro_batches):
        options.error("--batch: expected a multiple of --dp times --micro-batches")
    if arguments.zero == 3 and (arguments.tp > 1 or arguments.chunks > 1 or arguments.precision == "float16"):
        options.error("--zero 3: expected --tp 1, --chunks 1 and --precision float32 or bfloat16")
    timeout = timedelta(seconds=arguments.timeout)
    start(arguments, timeout)
    grid = Grid(arguments.dp, arguments.tp, arguments.pp, device=arguments.device, timeout=timeout)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // grid.world.size))
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet, data = torch.tensor([*map(ord, text)], device=grid.device).unique(return_inverse=True)

    config = GPTConfig(
        len(alphabet), arguments.context, arguments.layers, arguments.hidden, arguments.heads,
        dropout=arguments.dropout, sequence_parallel=arguments.sequence_parallel,
    )  # fmt: skip
    schedule = make_schedule(arguments.schedule, grid.pp.size, arguments.micro_batches, arguments.chunks)
    chunks = [chunk.to(grid.device) for chunk in gpt_stages(config, grid, chunks=schedule.chunks)]
    adam, dtype = partial(AdamW, lr=arguments.rate), getattr(torch, arguments.precision)
    tied = gpt_tied_weights(chunks, grid)
    trainer: MixedPrecision | ZeroOptimizer | FullySharded
    replicas: DataParallel | None = None
    if arguments.zero == 3:
        trainer = FullySharded(chunks, grid, adam, dtype)
        tied = gpt_tied_weights(chunks, grid)  # fully_shard has replaced the parameters
    elif arguments.zero:
        blocks = [block for chunk in chunks for block in chunk.blocks.values()]
        trainer = replicas = ZeroOptimizer(chunks, grid, adam, dtype, stage=arguments.zero, tied=tied, units=blocks)
        tied = []
    else:
        trainer = MixedPrecision(chunks, grid, adam, dtype)
        replicas = DataParallel(chunks, grid.dp_cp)
    pipeline = Pipeline(grid, chunks, schedule, gpt_loss(config, grid), data_parallel=replicas, tied=tied)
    first = 0
    if arguments.resume:
        states = saved_states(trainer)
        first = int(load_checkpoint(arguments.resume, chunks, states, grid)["step"])
        if isinstance(trainer, ZeroOptimizer):
            trainer.load_unsharded(states)
    if first >= arguments.steps:
        sys.exit(f"--steps: expected more than the {first} steps of the checkpoint, got {arguments.steps}")
    seed_ranks(grid, first)  # for dropout

    is_rank_0 = grid.world.rank == 0
    if is_rank_0:
        print(f"{grid} on {arguments.backend}: {len(data):,} characters of {len(alphabet)}; {schedule.name}")
    losses: list[torch.Tensor] = []  # on a GPU, reading one waits for the step
    printed, then = first, time.perf_counter()
    for step in range(first, arguments.steps):
        batch = sample(data, arguments.batch, arguments.context, step).chunk(grid.dp.size)[grid.dp.rank]
        losses.append(pipeline.step(batch[:, :-1], batch[:, 1:], trainer.loss_scale))
        trainer.step(MAX_NORM)
        trainer.zero_grad()
        done, now = step + 1, time.perf_counter()
        if is_rank_0 and (done == arguments.steps or done % max(1, arguments.steps // 10) == 0):
            rate = arguments.batch * arguments.context * (done - printed) / (now - then)
            print(f"step {done}/{arguments.steps}: loss {losses[-1].item():.4f}, {rate:,.0f} tokens/s")
            printed, then = done, now
    if arguments.save:
        save_checkpoint(arguments.save, chunks, saved_states(trainer), grid, {"step": arguments.steps})
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

    def step(self, max_norm: float) -> None:
        clip_grad_norm(self.chunks, self.grid, max_norm)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def saved_states(trainer: MixedPrecision | ZeroOptimizer | FullySharded) -> torch.optim.Optimizer | MixedPrecision:
    """Return what the checkpoint functions take."""
    if isinstance(trainer, ZeroOptimizer):
        return trainer.unsharded()
    return trainer.optimizer if isinstance(trainer, FullySharded) else trainer


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backend", choices=("gloo", "nccl", "ringcomm"), default="ringcomm")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: local rank modulo the number of GPUs")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="of each operation")
    add("--dp", type=int, default=1, metavar="N", help="replicas of the model (data parallelism)")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share each layer (tensor parallelism)")
    add("--pp", type=int, default=1, metavar="N", help="pipeline stages")
    add("--schedule", choices=SCHEDULES, default="1f1b")
    add("--chunks", type=int, default=1, metavar="N", help="stages of each rank, for --schedule interleaved")
    add("--micro-batches", type=int, default=4, metavar="N", help="of a replica's share of a batch")
    add("--sequence-parallel", action="store_true", help="shard norms and dropout along the sequence, over --tp")
    add("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="share states, gradients, parameters among replicas")
    add("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=16, help="sequences per step, of all replicas together")
    add("--context", type=int, default=64, help="sequence length, in characters")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--dropout", type=float, default=0.0, metavar="P", help="dropout probability")
    add("--rate", type=float, default=1e-3, help="learning rate")
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
