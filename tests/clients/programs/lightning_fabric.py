"""Lightning Fabric: the loop is the program's own."""

import tiny
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader


def run(backend, size):
    fabric = Fabric(accelerator="cpu", devices=size, strategy=DDPStrategy(process_group_backend=backend))
    fabric.launch()
    net = tiny.model()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(tiny.dataset(), batch_size=tiny.BATCH))
    losses = []
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = tiny.loss_of(net, batch)
        with fabric.no_backward_sync(net, enabled=step % 2 == 0):
            fabric.backward(loss)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
    numbers = fabric.all_reduce(torch.tensor([fabric.global_rank, 4]), reduce_op="mean")
    gathered = fabric.all_gather({"rank": torch.tensor(fabric.global_rank)})
    received = fabric.broadcast({"from": fabric.global_rank}, src=1)
    fabric.barrier()
    return losses, numbers.tolist(), gathered["rank"].tolist(), received, tiny.norms(net)
