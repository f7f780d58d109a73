"""A rank fails, torchrun restarts all ranks, and they go on from the checkpoint."""

import os
import sys
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FAILS_AT = 2


def main(backend):
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    net = DistributedDataParallel(tiny.model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    checkpoint = Path(f"{backend}.pt")
    losses = []
    if restarts:
        state = torch.load(checkpoint)
        losses = state["losses"]
        net.load_state_dict(state["model"])
    for batch in list(tiny.batches(rank, size))[len(losses) :]:
        if len(losses) == FAILS_AT and rank == 1 and not restarts:
            raise RuntimeError("rank 1 fails on purpose")
        optimizer.zero_grad()
        loss = tiny.loss_of(net, batch)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        losses.append(mean.item())
        if rank == 0:
            torch.save({"losses": losses, "model": net.state_dict()}, checkpoint)
        dist.barrier()
    tiny.finish(backend, [losses, restarts, tiny.norms(net)])


if __name__ == "__main__":
    main(*sys.argv[1:])
