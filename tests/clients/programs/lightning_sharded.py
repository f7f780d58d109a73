"""Lightning's Trainer with parameters that FSDP2 shards, and a checkpoint of the shards."""

import lightning
import tiny
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = tiny.model()
        self.losses = []

    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        loss = tiny.loss_of(self.net, batch)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def run(backend, size):
    losses = []
    for epochs in (1, 2):  # the second run goes on from the checkpoint of the first
        model = Regression()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=size,
            strategy=ModelParallelStrategy(size, 1, process_group_backend=backend),
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        checkpoint = f"{backend}-checkpoint"
        trainer.fit(
            model, DataLoader(tiny.dataset(), batch_size=tiny.BATCH), ckpt_path=checkpoint if epochs == 2 else None
        )
        trainer.save_checkpoint(checkpoint)
        losses.append([*model.losses, trainer.callback_metrics["loss_epoch"].item()])
    return losses
