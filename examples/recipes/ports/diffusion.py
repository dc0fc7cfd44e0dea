"""A diffusion model of images, written after lucidrains/denoising-diffusion-pytorch (MIT).

The loss draws times and noise, gradients are accumulated and clipped, and a moving average of the weights is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from recipes.ports.digits import digits
from worldsize.core import Recipe

TIMES = 50


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times, self.begin = nn.Embedding(TIMES, 16), nn.Conv2d(1, 16, 3, 1, 1)
        self.norm, self.end = nn.GroupNorm(4, 16), nn.Conv2d(16, 1, 3, 1, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hidden: Tensor = self.begin(x) + self.times(t)[..., None, None]
        noise: Tensor = self.end(F.silu(self.norm(hidden)))
        return noise


class GaussianDiffusion(nn.Module):
    alphas_cumprod: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.model = Denoiser()
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - torch.linspace(1e-4, 0.1, TIMES), dim=0))

    def forward(self, images: Tensor) -> Tensor:
        t = torch.randint(0, TIMES, (len(images),), device=images.device)
        noise = torch.randn_like(images)
        share = self.alphas_cumprod[t].view(-1, 1, 1, 1)
        x = share.sqrt() * (2 * images - 1) + (1 - share).sqrt() * noise
        return F.mse_loss(self.model(x, t), noise)


def original(model: nn.Module, batches: Iterator[Any]) -> Generator[Tensor, None, Mapping[str, Tensor]]:
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    gradient_accumulate_every, step, ema = 2, 0, copy.deepcopy(model)
    while step < 20:
        model.train()
        total_loss = torch.zeros(())
        for _ in range(gradient_accumulate_every):
            data, _ = next(batches)
            loss = model(data)
            loss = loss / gradient_accumulate_every
            total_loss += loss.detach()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        step += 1
        if step % 5 == 0:
            for mean, weight in zip(ema.parameters(), model.parameters(), strict=True):
                mean.data.lerp_(weight.data, 1.0 if step == 5 else 1 - 0.9)
        yield total_loss
    return {**model.state_dict(), **{f"ema/{name}": mean for name, mean in ema.named_parameters()}}


@final
class Diffusion(Recipe):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def model(self) -> nn.Module:
        return GaussianDiffusion()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.lr, betas=(0.9, 0.99))

    def data(self, split: str) -> TensorDataset:
        return TensorDataset(*digits(split))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        data, _ = batch
        loss: Tensor = model(data)
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        data, _ = batch
        count = torch.tensor(len(data))
        return {"loss": (model(data) * count, count)}
