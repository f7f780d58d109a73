"""ignite, which uses the process group that it finds. Its `auto_model` wraps models on the backends it knows only."""

import ignite.distributed as idist
import tiny
import torch
import torch.distributed as dist
from ignite.engine import Engine, Events
from ignite.metrics import Average, MeanSquaredError
from torch.nn.parallel import DistributedDataParallel


def run(backend, size):
    dist.init_process_group(backend)
    assert idist.get_world_size() == size
    net = idist.auto_model(tiny.model())
    assert isinstance(net, DistributedDataParallel) == (backend == "gloo"), "docs/clients.md says otherwise"
    if not isinstance(net, DistributedDataParallel):
        net = DistributedDataParallel(net)
    optimizer = idist.auto_optim(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

    def step(_, batch):
        optimizer.zero_grad()
        loss = tiny.loss_of(net, batch)
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "y_pred": net(batch[0]), "y": batch[1]}

    trainer = Engine(step)
    Average(output_transform=lambda output: output["loss"]).attach(trainer, "loss")
    MeanSquaredError().attach(trainer, "error")
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output["loss"]))
    trainer.run(idist.auto_dataloader(tiny.dataset(), batch_size=size * tiny.BATCH, shuffle=False), max_epochs=1)
    rank = idist.get_rank()
    exchanged = idist.all_gather(rank), idist.all_reduce(rank + 0.5), idist.broadcast(rank, src=1)
    return losses, trainer.state.metrics, exchanged, tiny.norms(net)
