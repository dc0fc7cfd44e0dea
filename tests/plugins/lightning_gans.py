"""Modules under manual optimization as their authors write them, without worldsize."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, NOISE = 96, 24, 4


class Images(L.LightningDataModule):
    """Synthetic images of 8 × 8 pixels."""

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.dataset = TensorDataset(torch.randn(SAMPLES, 1, 8, 8, generator=generator).tanh())

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=BATCH, shuffle=True)


class _Networks(L.LightningModule):
    """The two networks of a DCGAN."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * width, 4, 1, 0, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.BatchNorm2d(width),
            nn.Dropout(0.1),
            nn.Conv2d(width, 1, 4, 1, 0, bias=False),
            nn.Flatten(0),
        )

    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = self.generator(noise)
        return images

    def judged(self, images: Tensor, label: float) -> Tensor:
        scores = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))

    def noise(self, images: Tensor) -> Tensor:
        return torch.randn(len(images), NOISE, 1, 1, device=images.device)

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        optimizers = [torch.optim.Adam(part.parameters(), lr=0.002, betas=(0.5, 0.999)) for part in parts]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in optimizers]


class DCGAN(_Networks):
    """Trains as in Lightning's documentation; the generator in every second batch, and at the end of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        optimizer_g, optimizer_d = self.optimizers()  # type: ignore[attr-defined]
        _, schedule_d = self.lr_schedulers()  # type: ignore[misc]
        fake = self(self.noise(real))
        for label, images in ((1.0, real), (0.0, fake.detach())):
            loss_d = self.judged(images, label)
            optimizer_d.zero_grad()
            self.manual_backward(loss_d)
            optimizer_d.step()
            self.log(f"loss_{label:.0f}", loss_d)
        loss_g = self.judged(fake, 1.0)
        if batch_idx % 2 == 0 or self.trainer.is_last_batch:
            optimizer_g.zero_grad()
            self.manual_backward(loss_g)
            optimizer_g.step()
            self.log("loss_g", loss_g)
        else:
            self.log("loss_g", 0.0)
        if batch_idx % 3 == 0:
            schedule_d.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers()[0].step()  # type: ignore[index]


class ToggledGAN(_Networks):
    """Toggles its optimizers, zeroes gradients after a step, and adds up two losses of one optimizer."""

    def training_step(self, batch: Any) -> None:
        (real,) = batch
        optimizer_g, optimizer_d = self.optimizers()  # type: ignore[attr-defined]
        self.toggle_optimizer(optimizer_g)
        loss_g = self.judged(self(self.noise(real)), 1.0)
        self.manual_backward(loss_g)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        def closure() -> Tensor:
            with torch.no_grad():
                fake = self(self.noise(real))
            loss_real, loss_fake = self.judged(real, 1.0), self.judged(fake, 0.0)
            self.manual_backward(loss_real)
            self.manual_backward(loss_fake)
            return loss_real + loss_fake

        with optimizer_d.toggle_model():
            loss_d = optimizer_d.step(closure=closure)
            optimizer_d.zero_grad()
        self.log_dict({"loss_g": loss_g, "loss_d": loss_d})


class Pairs(L.LightningDataModule):
    """Points, each with noise to distinguish it from."""

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.dataset = TensorDataset(*(torch.randn(SAMPLES, size, generator=generator) for size in (6, NOISE)))

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=BATCH, shuffle=True)


class PlainGAN(L.LightningModule):
    """Neither draws numbers itself nor has BatchNorm: partial batches add up to the whole batch's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(NOISE, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        real, noise = batch
        fake = self.generator(noise)
        loss_critic = self.critic(fake.detach()).square().mean() + (self.critic(real) - 1).square().mean()
        return loss_critic, (self.critic(fake) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[attr-defined]
        for _ in range(2):
            loss_critic, _ = self.losses(batch)
            critic.zero_grad()
            self.manual_backward(loss_critic)
            critic.step()
        loss_generator = self.losses(batch)[1]
        generator.zero_grad()
        self.manual_backward(loss_generator)
        generator.step()
        self.log("distance", loss_generator)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.generator, self.critic)]
