"""Logistic regression on sparse data with parameter servers, then in one process.

    torchrun --standalone --nproc-per-node 4 examples/parameter_server.py
    torchrun --standalone --nproc-per-node 4 examples/parameter_server.py --staleness 4

Each example has 20 of 20,000 features. The servers hold their weights; in a step, a worker pulls those of the features
in its batch and pushes their gradients. Both runs reach the same accuracy; with `--staleness 0` they compute the same,
up to rounding.
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import Tensor, nn
from torch.optim import Adagrad

from ringcomm.parameter_server import ParameterServer, Worker

FEATURES, ACTIVE = 20_000, 20
TEST = 1_000_000  # a batch that no worker trains on


class LogisticRegression(nn.Module):
    """The active features of examples in, logits out: (N, ACTIVE) → (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor) -> Tensor:
        return F.embedding(features, self.weight, sparse=True).sum((1, 2)) + self.bias


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "ringcomm"), default="ringcomm")
    parser.add_argument("--servers", type=int, default=2, metavar="N", help="the first N ranks; others are workers")
    parser.add_argument("--staleness", type=int, default=0, metavar="N", help="pushes a worker may be ahead of others")
    parser.add_argument("--steps", type=int, default=400, help="of each worker")
    parser.add_argument("--batch", type=int, default=64, help="examples per worker")
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend)
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # else torch warns
    rank, size, servers = dist.get_rank(), dist.get_world_size(), [*range(arguments.servers)]
    if not 1 <= arguments.servers < size:
        parser.error(f"--servers: expected 1 to {size - 1} of {size} ranks, got {arguments.servers}")
    workers = size - len(servers)
    model, adagrad = LogisticRegression(), partial(Adagrad, lr=0.5)
    if rank in servers:
        ParameterServer(model.parameters(), servers, adagrad, staleness=arguments.staleness).serve()
    else:
        with Worker(model.parameters(), servers) as worker:
            for step in range(arguments.steps):
                features, labels = examples(step * workers + rank - len(servers), arguments.batch)
                worker.pull({model.weight: features})
                backward(model, features, labels)
                worker.push()
            worker.pull()
    if rank == len(servers):  # the first worker
        print(f"{len(servers)} servers and {workers} workers: accuracy {accuracy(model):.4f}")
        model = LogisticRegression()
        optimizer = adagrad(model.parameters())
        for step in range(arguments.steps):
            parts = [examples(step * workers + worker, arguments.batch) for worker in range(workers)]
            features, labels = (torch.cat(part) for part in zip(*parts, strict=True))
            backward(model, features, labels)
            optimizer.step()
        print(f"one process: accuracy {accuracy(model):.4f}")
    dist.destroy_process_group()


def examples(number: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the features (count, ACTIVE) and labels (count,) of a batch."""
    weights = torch.randn(FEATURES, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1 + number)
    # Low numbers are frequent, as those of frequent words in a vocabulary.
    features = (FEATURES * torch.rand(count, ACTIVE, generator=draw) ** 4).long()
    noise = torch.randn(count, generator=draw)
    return features, (weights[features].sum(1) + noise > 0).float()


def backward(model: LogisticRegression, features: Tensor, labels: Tensor) -> None:
    model.zero_grad()
    F.binary_cross_entropy_with_logits(model(features), labels).backward()  # type: ignore[no-untyped-call]


def accuracy(model: LogisticRegression) -> float:
    """Return the share of correct labels among examples that were not trained on."""
    features, labels = examples(TEST, 4096)
    with torch.no_grad():
        return float(((model(features) > 0) == labels.bool()).float().mean())


if __name__ == "__main__":
    main()
