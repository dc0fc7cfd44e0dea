"""A port is verified by the losses and weights of the original program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.testing.token_port import CONFIG, Losses, Port, Program, net, told
from worldsize.testing import PortConfig, compose_recipe, same_losses
from worldsize.testing.port_runs import recipe_trained
from worldsize.testing.recipes import TwoPlayers

Batch = tuple[Tensor, Tensor]


def copy_of(model: nn.Module) -> nn.Module:
    own = nn.ModuleDict({"body": net()})
    own.forward = own["body"].forward
    own["body"].load_state_dict(model.state_dict())
    return own


def test_a_right_port_passes() -> None:
    same_losses(Port(), Program(), CONFIG)
    same_losses(Port(dropout=0.3), Program(), CONFIG)
    same_losses(Port(), Program(own_model=copy_of), CONFIG)  # its weights have different names
    same_losses(Port(), Program(pieces=4), PortConfig(batch_size=8, micro_batches=4, steps=6), tolerance=1e-5)


def test_losses_that_were_logged_are_enough() -> None:
    kept: list[float] = []

    def reference(model: nn.Module, batches: Iterator[Tensor]) -> Iterator[float]:
        for loss in Program()(model, batches):
            kept.append(float(loss))
            yield kept[-1]

    same_losses(Port(), reference, CONFIG)
    same_losses(Port(), kept, CONFIG)
    assert "step 4 on" in told(Port(), [*kept[:3], 7.0, 7.0, 7.0])


@dataclass(frozen=True)
class Faster(TwoPlayers):
    """Players where one learns faster than in the original."""

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        optimizers = super().optimizers(model)
        optimizers["player"].param_groups[0]["lr"] *= 2
        return optimizers


def test_a_recipe_with_several_updates_a_step_is_told_where_it_differs() -> None:
    config = PortConfig(batch_size=8, steps=4)
    own = recipe_trained(TwoPlayers(), config).losses
    same_losses(TwoPlayers(), own, config)
    text = told(Faster(), own, config)
    assert "the losses differ from step 2 on" in text
    with pytest.raises(AssertionError, match="Cause: an update of step 1 or earlier. Compare Recipe.updates"):
        same_losses(Faster(), lambda model, batches: original(model, batches, own), config)


def original(model: nn.Module, batches: Iterator[Any], losses: Sequence[float]) -> Losses:
    """Take a batch a step, as the original's loop does, and return its losses."""
    for loss in losses:
        next(batches)
        yield loss
    return model


def test_weights_are_compared_after_the_last_loss() -> None:
    def restless(model: nn.Module, batches: Iterator[Tensor]) -> Losses:
        model = yield from Program()(model, batches)
        with torch.no_grad():
            next(model.parameters())[1, 1] += 0.5
        return model

    text = told(Port(), restless)
    assert "the losses match, but the weights after the last step do not: 0.weight differs by up to 5.0e-01" in text
    assert "The update of step 6 differs in 1 of 7 tensors: 0.weight" in text


def test_the_yaml_is_part_of_what_is_proved() -> None:
    recipe, config = compose_recipe("recipe=digits", "steps=2", "seed=4", "numerics.clip_norm=0.5", "schedule=constant")
    assert (config.steps, config.seed, config.numerics.clip_norm) == (2, 4, 0.5)

    def original(model: nn.Module, batches: Iterator[Batch]) -> Losses:
        optimizer = recipe.optimizer(model)
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            yield loss
        return model

    same_losses(recipe, original, config)
