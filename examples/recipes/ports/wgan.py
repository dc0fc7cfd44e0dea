"""A Wasserstein GAN, written after implementations/wgan of eriklindernoren/PyTorch-GAN (MIT).

The critic is updated in each step and its weights are clipped; the generator follows in every fifth step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, RMSprop
from torch.utils.data import TensorDataset

from recipes.ports.digits import digits
from worldsize.core import MultiUpdateRecipe, Update

LATENT, CRITICS, CLIP = 8, 5, 0.01


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(LATENT, 32), nn.LeakyReLU(0.2), nn.Linear(32, 64), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def original(model: Any, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    generator, discriminator = model.generator, model.discriminator
    optimizer_g = RMSprop(generator.parameters(), lr=5e-4)
    optimizer_d = RMSprop(discriminator.parameters(), lr=5e-4)
    for i, (imgs, _) in enumerate(batches):
        real_imgs = 2 * imgs.flatten(1) - 1
        optimizer_d.zero_grad()
        z = torch.randn(len(imgs), LATENT)
        fake_imgs = generator(z).detach()
        loss_d = -torch.mean(discriminator(real_imgs)) + torch.mean(discriminator(fake_imgs))
        loss_d.backward()
        optimizer_d.step()
        for p in discriminator.parameters():
            p.data.clamp_(-CLIP, CLIP)
        loss = loss_d.detach()
        if i % CRITICS == 0:
            optimizer_g.zero_grad()
            gen_imgs = generator(z)
            loss_g = -torch.mean(discriminator(gen_imgs))
            loss_g.backward()
            optimizer_g.step()
            loss = loss + loss_g.detach()
        yield loss
    return model


def clip_weights(optimizer: Optimizer, *_: object) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.data.clamp_(-CLIP, CLIP)


@final
class WGAN(MultiUpdateRecipe):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def model(self) -> nn.Module:
        return GAN()

    def optimizers(self, model: Any) -> Mapping[str, Optimizer]:
        critic = RMSprop(model.discriminator.parameters(), lr=self.lr)
        critic.register_step_post_hook(clip_weights)
        return {"D": critic, "G": RMSprop(model.generator.parameters(), lr=self.lr)}

    def data(self, split: str) -> TensorDataset:
        return TensorDataset(*digits(split))

    def updates(self, model: Any, batch: Any, step: int) -> Iterable[Update]:
        imgs, _ = batch
        z = torch.randn(len(imgs), LATENT)
        real, fake = 2 * imgs.flatten(1) - 1, model.generator(z).detach()
        yield "D", -torch.mean(model.discriminator(real)) + torch.mean(model.discriminator(fake))
        if (step - 1) % CRITICS == 0:
            yield "G", -torch.mean(model.discriminator(model.generator(z)))

    def evaluate(self, model: Any, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        imgs, _ = batch
        return {"score": (model.discriminator(2 * imgs.flatten(1) - 1).sum(), torch.tensor(len(imgs)))}
