"""accelerate, which uses the process group that it finds."""

import tiny
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch.utils.data import DataLoader


def run(backend, size):
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = tiny.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(tiny.dataset(), batch_size=tiny.BATCH)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(net):
            loss = tiny.loss_of(net, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).tolist())
    rank = accelerator.process_index
    uneven = accelerator.pad_across_processes(torch.arange(1 + rank), pad_index=-1)
    numbers = accelerator.reduce(torch.tensor([rank, 5]), reduction="sum")
    objects = broadcast_object_list([{"from": rank}], from_process=1), gather_object([rank])
    accelerator.wait_for_everyone()
    assert accelerator.num_processes == size
    return losses, accelerator.gather(uneven).tolist(), numbers.tolist(), objects, tiny.norms(net)
