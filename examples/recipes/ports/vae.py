"""A variational autoencoder, written after vae of pytorch/examples (BSD-3-Clause).

Its loss draws random numbers, and is a sum over the batch that no count divides.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from recipes.ports.digits import digits
from worldsize.core import Recipe


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.fc3, self.fc4 = nn.Linear(8, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h1 = F.relu(self.fc1(x.flatten(1)))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        std = torch.exp(0.5 * logvar)
        z = mu + torch.randn_like(std) * std
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    entropy = F.binary_cross_entropy(recon_x, x.flatten(1), reduction="sum")
    divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return entropy + divergence


def original(model: nn.Module, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for data, _ in batches:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        yield loss
    return model


@final
class Autoencoder(Recipe):
    def __init__(self, lr: float, batch_size: int) -> None:
        self.lr, self.batch_size = lr, batch_size

    def model(self) -> nn.Module:
        return VAE()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.lr)

    def data(self, split: str) -> TensorDataset:
        return TensorDataset(*digits(split))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        data, _ = batch
        recon_batch, mu, logvar = model(data)
        total = loss_function(recon_batch, data, mu, logvar)
        return total * self.batch_size, torch.tensor(float(len(data)))  # divided by all samples, it is the sum again

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        data, _ = batch
        recon_batch, mu, logvar = model(data)
        return {"loss": (loss_function(recon_batch, data, mu, logvar), torch.tensor(len(data)))}
