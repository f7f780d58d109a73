"""Train a small GPT on real text, with data, tensor and pipeline parallelism, on ringcomm or on Gloo.

    python examples/train_gpt.py                                                              one process
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --dp 2 --pp 2              four

The text is what every Python installation carries: the help topics of `pydoc_data`, half a million characters. The loss
is that of the next character, in nats. Whatever the grid, the schedule and the backend, it is the same: the batch of a
step depends on the number of the step only, and each replica takes its share.

`--save FOLDER` writes a checkpoint at the end; `--resume FOLDER` goes on from one, on any grid.
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW

from ringcomm.parallel import (
    DataParallel,
    GPTConfig,
    Grid,
    MixedPrecision,
    Pipeline,
    clip_grad_norm,
    gpt_loss,
    gpt_stages,
    gpt_tied,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
)
from ringcomm.parallel.schedule import SCHEDULES

MOST = 1.0  # of the norm of the gradients; what is longer is clipped


def main() -> None:
    arguments = parser().parse_args()
    start(arguments.backend)
    grid = Grid(arguments.dp, arguments.tp, arguments.pp)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // grid.world.size))
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    data = torch.tensor([numbers[character] for character in text])

    config = GPTConfig(
        len(alphabet), arguments.context, arguments.layers, arguments.hidden, arguments.heads,
        sequence_parallel=arguments.sequence_parallel,
    )  # fmt: skip
    schedule = make_schedule(arguments.schedule, grid.pp.size, arguments.micro_batches, arguments.chunks)
    chunks = gpt_stages(config, grid, chunks=schedule.chunks)
    update = Update(arguments, chunks, grid)
    pipeline = Pipeline(
        grid, chunks, schedule, gpt_loss(config, grid),
        replicas=DataParallel(chunks, grid.dp), tied=gpt_tied(chunks, grid),
    )  # fmt: skip
    first = update.resume(arguments.resume) if arguments.resume else 0

    share = grid.dp.share("sequences of a batch", arguments.batch)
    progress = Progress(arguments, first) if grid.world.rank == 0 else None
    if progress:
        print(f"{grid} on {arguments.backend}: {len(data):,} characters of {len(alphabet)}; {schedule.name}")
    for step in range(first, arguments.steps):
        batch = draw(data, arguments.batch, arguments.context, step).split(share)[grid.dp.rank]
        loss = pipeline.step(batch[:, :-1], batch[:, 1:], update.scale)
        dist.all_reduce(loss, group=grid.dp.group)
        update.step()
        if progress:
            progress.show(step + 1, loss.item() / grid.dp.size)
    if arguments.save:
        update.save(arguments.save, arguments.steps)
    if progress and arguments.plot:
        progress.plot(arguments.plot)
    dist.destroy_process_group()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backend", choices=("gloo", "ringcomm"), default="ringcomm")
    add("--dp", type=int, default=1, metavar="N", help="replicas of the model, which share a batch")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share each layer")
    add("--pp", type=int, default=1, metavar="N", help="ranks that share the layers one after the other")
    add("--schedule", choices=SCHEDULES, default="1f1b")
    add("--chunks", type=int, default=1, metavar="N", help="of each rank of an interleaved pipeline")
    add("--micro-batches", type=int, default=4, metavar="N", help="into which a replica's share of a batch is cut")
    add("--sequence-parallel", action="store_true", help="split norms and dropout along the sequence, over --tp")
    add("--zero", type=int, choices=(0, 1), default=0, help="1: replicas share the states of the optimizer (ZeRO)")
    add("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=16, help="sequences of a step, of all replicas together")
    add("--context", type=int, default=64, help="characters of a sequence")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--rate", type=float, default=1e-3, help="the learning rate")
    add("--save", type=Path, metavar="FOLDER", help="write a checkpoint at the end")
    add("--resume", type=Path, metavar="FOLDER", help="go on from a checkpoint, up to --steps")
    add("--plot", type=Path, metavar="PICTURE", help="draw the loss; needs matplotlib")
    return parser


def start(backend: str) -> None:
    """Join the ranks that torchrun has started; without it, be alone."""
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def draw(data: torch.Tensor, batch: int, context: int, step: int) -> torch.Tensor:
    """Return the sequences of a step, with the character that follows: shape (batch, context + 1)."""
    starts = torch.randint(len(data) - context - 1, (batch,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[start : start + context + 1] for start in starts])


class Update:
    """What follows backward: gradients are clipped, and an optimizer makes its step."""

    def __init__(self, arguments: argparse.Namespace, chunks: list[nn.Module], grid: Grid) -> None:
        self.chunks, self.grid = chunks, grid
        make = partial(ZeroRedundancyOptimizer, optimizer_class=AdamW, process_group=grid.dp.group)
        make = partial(make if arguments.zero else AdamW, lr=arguments.rate)
        self.mixed = None
        if arguments.precision == "float32":
            self.optimizer = make(nn.ModuleList(chunks).parameters())
        else:
            self.mixed = MixedPrecision(chunks, grid, make, getattr(torch, arguments.precision))
            self.optimizer = self.mixed.optimizer

    @property
    def scale(self) -> float:
        return self.mixed.scale if self.mixed else 1.0

    def step(self) -> None:
        if self.mixed:
            self.mixed.step(MOST)
            self.mixed.zero_grad()
        else:
            clip_grad_norm(self.chunks, self.grid, MOST)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder: Path, step: int) -> None:
        numbers = {"step": step, **(self.mixed.state_dict() if self.mixed else {})}
        save_checkpoint(folder, self.chunks, self.optimizer, self.grid, numbers)

    def resume(self, folder: Path) -> int:
        """Go on from a checkpoint, and return its step."""
        numbers = load_checkpoint(folder, self.chunks, self.optimizer, self.grid)
        if self.mixed:
            self.mixed.load_state_dict(numbers)
        return int(numbers["step"])


class Progress:
    """What is shown of the training: a line that grows, every tenth of it kept."""

    def __init__(self, arguments: argparse.Namespace, first: int) -> None:
        self.first, self.steps = first, arguments.steps
        self.tokens = arguments.batch * arguments.context
        self.losses: list[float] = []
        self.begin = time.perf_counter()

    def show(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        rate = self.tokens * len(self.losses) / (time.perf_counter() - self.begin)
        done = 20 * step // self.steps
        line = f"step {step}/{self.steps} {'█' * done}{'░' * (20 - done)} loss {loss:.4f}, {rate:,.0f} tokens/s"
        if step == self.steps or step % max(1, self.steps // 10) == 0:
            print(line)
        elif sys.stdout.isatty():
            print(line, end="\r", flush=True)

    def plot(self, picture: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure()
        axes = figure.subplots()
        axes.plot(range(self.first + 1, self.steps + 1), self.losses)
        axes.set(xlabel="step", ylabel="loss (nats for each character)", title="GPT on the help topics of Python")
        axes.grid(alpha=0.3)
        figure.savefig(picture)


if __name__ == "__main__":
    main()
