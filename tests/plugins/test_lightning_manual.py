"""A LightningModule under manual optimization trains as under Lightning, or is refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.lightning_module.positions import RunValues
from plugins.lightning_module.program import LightningProgram
from plugins.lightning_module.recipe import lightning_recipe
from tests.plugins.lightning_gans import BATCH, DCGAN, Images, ToggledGAN
from tests.plugins.lightning_reference import fitted
from worldsize.core import Recipe
from worldsize.testing import PortConfig, same_losses

CONFIG = PortConfig(batch_size=BATCH, steps=24)


def recipe(module: Any) -> Recipe:
    run = RunValues(steps=24, batch_size=BATCH, evaluate_batch_size=32, seed=0)
    return lightning_recipe(LightningProgram(module, Images, run))


@pytest.mark.parametrize("module", [DCGAN, ToggledGAN])
def test_a_gan_trains_as_under_lightning(module: Any) -> None:
    same_losses(recipe(module), fitted(module, steps=24), CONFIG)
