"""Programs for Lightning as their authors write them, without worldsize."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 96, 24


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


class Points(L.LightningDataModule):
    def __init__(self, batch_size: int = BATCH) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.dataset = points()

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=32)


class Classifier(L.LightningModule):
    """A classifier with dropout and a schedule that advances by epochs."""

    def __init__(self, hidden: int = 16, lr: float = 0.01, interval: str = "epoch", frequency: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.interval, self.frequency = lr, interval, frequency
        self.net = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_accuracy", (logits.argmax(1) == y).float().mean(), on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_acc": (logits.argmax(1) == y).float().mean()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        how = {"interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **how}}


class VAE(L.LightningModule):
    """An autoencoder that calls its submodules directly, and draws noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, _ = batch
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        error = F.mse_loss(self.decoder(z), x)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean()
        self.log("error", error)
        return {"loss": error + 0.1 * divergence / (1 + batch_idx + self.current_epoch + self.global_step)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(steps)), "interval": "step"}
        ]
