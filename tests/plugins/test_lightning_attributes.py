"""Attributes set by a training step belong to one micro-batch, though several take turns in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plugins.lightning_gans import BATCH, Pairs, PlainGAN
from tests.plugins.test_lightning_manual import ALONE, recipe
from worldsize.core import RunContext
from worldsize.strategies.synchronous import create_local_replica
from worldsize.testing import PortConfig
from worldsize.testing.port_runs import initial_model, load_steps


class ByVariable(PlainGAN):
    """Keeps its images in a local variable between updates."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        fake = self.generator(noise)
        self.update_critic(real, fake)
        self.update_generator(fake)

    def update_critic(self, real: Tensor, fake: Tensor) -> None:
        critic = self.optimizers()[1]  # type: ignore[index]
        critic.zero_grad()
        self.manual_backward(self.critic(fake.detach()).square().mean() + (self.critic(real) - 1).square().mean())
        critic.step()

    def update_generator(self, fake: Tensor) -> None:
        generator = self.optimizers()[0]  # type: ignore[index]
        generator.zero_grad()
        self.manual_backward((self.critic(fake) - 1).square().mean())
        generator.step()


class ByAttribute(ByVariable):
    """Keeps them in an attribute that a second method uses, and in an attribute of a submodule."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        self.generator.noise = noise
        self.fake = self.generator(noise)
        self.update_critic(real, self.fake)
        assert self.generator.noise is noise
        self.update_generator(self.fake)
        del self.fake


def trained(module: Any, micro_batches: int) -> tuple[Any, Mapping[str, Tensor]]:
    own, config = recipe(module, Pairs), PortConfig(batch_size=BATCH, steps=6, micro_batches=micro_batches)
    model: Any = initial_model(own, config)
    replica = create_local_replica(own, model, RunContext(ALONE, logical_ranks=micro_batches))
    for step in load_steps(own, config):
        replica.step(step)
    return model.lightning, dict(replica.state()["model"])


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_an_attribute_is_as_good_as_a_variable(micro_batches: int) -> None:
    expected, weights = (trained(module, micro_batches)[1] for module in (ByVariable, ByAttribute))
    assert [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)] == []


class Counting(PlainGAN):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.alpha = 0, 1.0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.count += 1

    def on_train_epoch_end(self) -> None:
        self.alpha *= 0.5


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_what_goes_on_from_step_to_step_counts_each_once(micro_batches: int) -> None:
    module, _ = trained(Counting, micro_batches)
    assert (module.count, module.alpha) == (6, 0.5)  # for an epoch and a half
