"""Modes of modules belong to the program: an evaluation or an update restores them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from worldsize.core import EvaluationBatch
from worldsize.strategies.layer_streams import LayerStreams
from worldsize.strategies.model_replica import ModelFlags, collect_metrics, evaluating
from worldsize.testing.recipes import Chain


def modes(model: nn.Module) -> dict[str, bool]:
    """Return the mode of each module by name."""
    return {name: module.training for name, module in model.named_modules()}


def frozen_encoder() -> nn.Module:
    """Build a model whose encoder is in evaluation mode, except for its last part."""
    encoder = nn.Sequential(nn.Linear(7, 7), nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)))
    model = nn.Sequential(encoder, nn.Linear(7, 3))
    encoder.eval()
    encoder[1].train()
    return model


def test_an_evaluation_restores_the_mode_of_each_module() -> None:
    model = frozen_encoder()
    before = modes(model)
    streams = LayerStreams(Chain(), model, torch.device("cpu"), by_layer=True)
    inputs, targets = Chain().data("test")[:]
    collect_metrics(Chain(), model, [EvaluationBatch(0, (inputs, targets))], streams=streams)
    assert modes(model) == before
    assert set(before.values()) == {False, True}


def test_a_module_that_two_parents_share_keeps_its_mode() -> None:
    shared = nn.Dropout()
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    model[1].training = False  # only the second parent: its train() would change the child
    before = modes(model)
    with evaluating([model]):
        assert not any(modes(model).values())
    assert modes(model) == before


def test_modes_are_restored_after_an_evaluation_that_fails() -> None:
    model = frozen_encoder()
    before = modes(model)
    with pytest.raises(ZeroDivisionError), evaluating([model]):
        _ = 1 / 0
    assert modes(model) == before


def test_flags_of_a_step_are_those_of_each_module() -> None:
    model = frozen_encoder()
    before, flags = modes(model), ModelFlags(model)
    model.train()
    flags.restore()
    assert modes(model) == before
