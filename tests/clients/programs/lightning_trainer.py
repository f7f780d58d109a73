"""Lightning's Trainer: DDP, metrics averaged over the ranks, and validation."""

import lightning
import tiny
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = tiny.model()
        self.seen = []

    def training_step(self, batch, index):
        loss = tiny.loss_of(self.net, batch)
        self.log("loss", loss, sync_dist=True)
        self.log("number", torch.tensor(10 * index + 3 * self.global_rank), sync_dist=True)
        self.log("rows", torch.tensor(len(batch[0])), sync_dist=True, reduce_fx="sum")
        return loss

    def on_train_batch_end(self, *_):
        self.seen.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})

    def validation_step(self, batch, _):
        # At the end of the epoch, Lightning also averages the number of rows that each rank has seen: an int64.
        self.log("validation", tiny.loss_of(self.net, batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def run(backend, size):
    lightning.seed_everything(0, verbose=False)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(tiny.dataset(), batch_size=tiny.BATCH)
    trainer.fit(model, loader, loader)
    gathered = trainer.strategy.all_gather(torch.tensor([model.global_rank]))
    return model.seen, gathered.tolist(), trainer.callback_metrics["validation"].item(), tiny.norms(model.net)
