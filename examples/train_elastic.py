"""Train a small GPT on ranks that are killed at random moments and come back, without losing a step.

    ringcomm run -n 4 --respawn 1000 examples/train_elastic.py --kill-every 5

All ranks share each batch. When a rank is lost, the others continue at once (`ringcomm.torch.shrink`); when
`ringcomm run` has started it again, it joins them (`grow`) and gets their state (`load_latest`). The batch of a step
depends on its number alone, so the loss is that of an undisturbed run (`--kill-every 0`), up to rounding. Those
that train draw lots whose turn it is to die, so that one is always left, with which the others can continue.
"""

import argparse
import math
import os
import random
import signal
import time
from pydoc_data.topics import topics

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch logs a C++ stack when the rank of its store dies

import torch
import torch.distributed as dist

import ringcomm.torch
from ringcomm import Aborted, CollectiveTimeout, PeerLost
from ringcomm.parallel import DataParallel, GPTConfig, Grid, gpt_loss, gpt_stages

BATCH = 12  # sequences per step, of all ranks together: a multiple of 1, 2, 3 and 4
CONTEXT = 64


def main() -> None:
    options = parser()
    arguments = options.parse_args()
    if os.environ.get("RINGCOMM_MAX_RESTARTS", "0") == "0":
        options.error("expected to be started by ringcomm run --respawn N, with N of 1 or more")
    ranks = int(os.environ["RINGCOMM_SIZE"])
    if ranks > 4:
        options.error(f"expected at most 4 ranks, which divide a batch of {BATCH} sequences, got {ranks}")
    ringcomm.torch.init_process_group(arguments.timeout)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    alphabet, data = torch.tensor([*map(ord, "\n".join(topics.values()))]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    training = Training(GPTConfig(len(alphabet), CONTEXT, layers=2, hidden=64, heads=4))

    step, loss, ready, lost, then = 0, math.nan, False, "", time.perf_counter()
    while step < arguments.steps:
        try:
            if not ready:
                signal.setitimer(signal.ITIMER_REAL, 0)  # nobody dies until all know the state of the model
                step = ringcomm.torch.load_latest(step, [training.model, training.optimizer])
                training.connect()
                draw_lots(arguments.kill_every)
                ready = True
            loss = training.step(sample(data, step))
            step, before, then = step + 1, then, time.perf_counter()
            if lost:
                report(
                    f"step {step} done by {dist.get_world_size()} ranks {then - before:.2f} s after the last: {lost}"
                )
                lost = ""
            if step < arguments.steps and dist.get_world_size() < ranks and ringcomm.torch.grow(timeout=0.0):
                ready = False
                report(f"step {step} done; lost ranks are back: {dist.get_world_size()} of {ranks}")
        except (PeerLost, CollectiveTimeout, Aborted) as error:
            ready, lost = False, str(error).partition("\n")[0]
            ringcomm.torch.shrink(arguments.timeout)
    signal.setitimer(signal.ITIMER_REAL, 0)
    report(f"{step} steps, {training.sequences} sequences, loss {loss:.4f}")
    dist.destroy_process_group()


class Training:
    """A model and its optimizer, which outlive the groups on which they are trained."""

    def __init__(self, config: GPTConfig) -> None:
        with Grid.alone() as alone:
            (self.model,) = gpt_stages(config, alone)
            self.loss = gpt_loss(config, alone)
        self.sequences = torch.zeros((), dtype=torch.int64)  # that the model has seen
        self.model.register_buffer("sequences", self.sequences)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.replicas: DataParallel | None = None

    def connect(self) -> None:
        """Average gradients over the ranks that there are."""
        if self.replicas:
            self.replicas.close()
        self.optimizer.zero_grad()  # of a step that was not finished
        self.grid = Grid(dp=dist.get_world_size())
        self.replicas = DataParallel(self.model, self.grid.dp)

    def step(self, batch: torch.Tensor) -> float:
        """Train on a batch, of which each rank takes its share, and return the loss."""
        share = batch.chunk(self.grid.dp.size)[self.grid.dp.rank]
        loss = self.loss(self.model(share[:, :-1]), share[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        assert self.replicas
        self.replicas.finish_grad_sync()
        total = torch.stack([loss.detach(), torch.tensor(float(len(share)))])
        dist.all_reduce(total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sequences += int(total[1])
        return total[0].item() / self.grid.dp.size


def sample(data: torch.Tensor, step: int) -> torch.Tensor:
    """Return the sequences of a step, (batch, context + 1): inputs and next characters."""
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[start : start + CONTEXT + 1] for start in starts])


def draw_lots(mean: float) -> None:
    """Let one rank of several, which all draw together, die after a random time with this mean, in seconds."""
    lots = [random.randrange(dist.get_world_size()), random.expovariate(1 / mean) if mean else 0.0]
    dist.broadcast_object_list(lots)  # those of rank 0
    if dist.get_world_size() > 1 and lots[0] == dist.get_rank():
        signal.setitimer(signal.ITIMER_REAL, lots[1])  # SIGALRM ends the process, in whatever it does


def report(text: str) -> None:
    if dist.get_rank() == 0:
        print(text)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--kill-every", type=seconds, default=5.0, metavar="SECONDS", help="mean time between two losses (5); 0: none"
    )
    parser.add_argument("--timeout", type=seconds, default=60.0, metavar="SECONDS", help="of each operation")
    return parser


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got {text}")
    return value


if __name__ == "__main__":
    main()
