"""A small DCGAN, as a recipe and as the original program's loop in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import TensorDataset

from worldsize.core import MultiUpdateRecipe, Update
from worldsize.data.batches import fetch_batch
from worldsize.data.order import Order
from worldsize.seeds import seed_generators

SAMPLES, BATCH, SEED, NOISE, WIDTH = 96, 16, 3, 6, 4
CPU = torch.device("cpu")


class GAN(nn.Module):
    """The two networks of Radford et al. 2016 (arXiv 1511.06434) for images of 8 × 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * WIDTH, 2, 1, 0, bias=False),
            nn.BatchNorm2d(2 * WIDTH),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, WIDTH, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * WIDTH),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * WIDTH, 1, 2, 1, 0, bias=False),
            nn.Sigmoid(),
        )
        self.apply(initialise)


def initialise(module: nn.Module) -> None:
    """Initialise weights as in the paper."""
    name = type(module).__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.02)  # type: ignore[arg-type]
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)  # type: ignore[arg-type]
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]


def model() -> GAN:
    torch.manual_seed(5)
    return GAN()


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.rand(SAMPLES, 1, 8, 8, generator=generator) * 2 - 1)


def criterion(scores: Tensor, label: float) -> Tensor:
    return nn.functional.binary_cross_entropy(scores.view(-1), torch.full((len(scores),), label))


@dataclass(frozen=True)
class DCGAN(MultiUpdateRecipe):
    """The recipe."""

    critics: int = 1  # updates of the discriminator per step

    def model(self) -> nn.Module:
        return model()

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        assert isinstance(model, GAN)
        return {
            name: Adam(getattr(model, name).parameters(), lr=0.0002, betas=(0.5, 0.999))
            for name in ("discriminator", "generator")
        }

    def data(self, split: str) -> TensorDataset:
        return images()

    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        assert isinstance(model, GAN)
        (real,) = batch
        on_real = criterion(model.discriminator(real), 1.0)
        fake = model.generator(torch.randn(len(real), NOISE, 1, 1))
        yield "discriminator", on_real + criterion(model.discriminator(fake.detach()), 0.0)
        yield "generator", criterion(model.discriminator(fake), 1.0)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        assert isinstance(model, GAN)
        (real,) = batch
        return {"recognised": ((model.discriminator(real) > 0.5).double().sum(), torch.tensor(len(real)))}


def original(steps: int) -> Mapping[str, Tensor]:
    """Train by the original program's loop (pytorch/examples, dcgan/main.py), with the documented order and seeds."""
    gan, data, order = model(), images(), Order(SEED, BATCH, 1, (0,))
    net_d, net_g = gan.discriminator, gan.generator
    optimizer_d = Adam(net_d.parameters(), lr=0.0002, betas=(0.5, 0.999))
    optimizer_g = Adam(net_g.parameters(), lr=0.0002, betas=(0.5, 0.999))
    for step in range(1, steps + 1):
        seed_generators(order.step_seed(step, 0), CPU)
        (real,) = fetch_batch(data, order.compute_indices(step, 0, SAMPLES))
        net_d.zero_grad()
        criterion(net_d(real), 1.0).backward()  # type: ignore[no-untyped-call]
        fake = net_g(torch.randn(len(real), NOISE, 1, 1))
        criterion(net_d(fake.detach()), 0.0).backward()  # type: ignore[no-untyped-call]
        optimizer_d.step()
        net_g.zero_grad()
        criterion(net_d(fake), 1.0).backward()  # type: ignore[no-untyped-call]
        optimizer_g.step()
    return gan.state_dict()
