"""Train a small transformer on real text, by DistributedDataParallel, on Gloo or on ringcomm.

    torchrun --standalone --nproc-per-node 2 examples/ddp_text.py --backend ringcomm

The text comes with every Python: the help topics of `pydoc_data`, half a million characters. The loss is the cross
entropy of the next character, in nats. Both backends reach the same loss; the tokens per second differ.
"""

import argparse
import os
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Transformer(nn.Module):
    """Characters in, scores of the next character out: shape (batch, context) → (batch, context, vocabulary)."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.positions
        scores: torch.Tensor = self.head(self.layers(x, mask=self.mask, is_causal=True))
        return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "ringcomm"), default="ringcomm")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU per rank, round robin")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch found no GPU")

    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    if arguments.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())

    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet, data = torch.tensor([*map(ord, text)], device=arguments.device).unique(return_inverse=True)

    torch.manual_seed(0)  # the same model on every rank; the text differs
    transformer = Transformer(len(alphabet), arguments.context, arguments.width, arguments.depth)
    model = DistributedDataParallel(transformer.to(arguments.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(rank)

    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{size} ranks on {arguments.backend}: {count:,} parameters, {len(data):,} characters of {len(alphabet)}")
    begin = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(data) - arguments.context - 1, (arguments.batch,), generator=draw)
        pieces = torch.stack([data[start : start + arguments.context + 1] for start in starts])
        scores = model(pieces[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == arguments.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                tokens = step * size * arguments.batch * arguments.context
                rate = tokens / (time.perf_counter() - begin)
                print(f"step {step}: loss {mean.item() / size:.4f}, {rate:,.0f} tokens/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
