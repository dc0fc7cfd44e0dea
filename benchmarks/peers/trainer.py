"""Train with Lightning Trainer, which logs the loss every ten steps to a CSV file."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from common import BATCH, LOG_EVERY, Report, arguments, dataset, model


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = model()

    def training_step(self, batch: Any, _: int) -> Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.network(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Timing(lightning.Callback):
    def __init__(self, report: Report) -> None:
        self.report = report

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        self.report.step(trainer.global_step)


def main() -> None:
    steps, out = arguments()
    processes = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, 2 // processes))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        max_steps=steps,
        log_every_n_steps=LOG_EVERY,
        logger=CSVLogger(str(out.parent), name=out.stem),
        callbacks=[Timing(Report(steps, out))],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), DataLoader(dataset(), batch_size=BATCH, shuffle=True, drop_last=True))


if __name__ == "__main__":
    main()
