"""Recorded runs and plugins that name modules as they were before still work."""

from __future__ import annotations

import importlib

import pytest

from worldsize.config.instantiate import Allowed, build
from worldsize.core import Strategy
from worldsize.moved import MOVED, current, rename_targets


@pytest.mark.parametrize("path", MOVED)
def test_an_earlier_module_is_importable_and_stands_for_one_that_exists(path: str) -> None:
    before, now = importlib.import_module(path), importlib.import_module(MOVED[path])
    for name in (name for name, value in vars(now).items() if getattr(value, "__module__", None) == now.__name__):
        with pytest.warns(FutureWarning, match=f"{path} is {MOVED[path]} now; import {name} from there"):
            assert getattr(before, name) is getattr(now, name)


def test_looking_through_the_loaded_modules_warns_of_nothing() -> None:
    before = importlib.import_module("worldsize.engine")
    assert not hasattr(before, "__file__")
    assert not hasattr(before, "__path__")


def test_targets_of_a_record_are_renamed_at_every_depth() -> None:
    node = {
        "strategy": {"_target_": "worldsize.strategies.parameter_server.strategy.ParameterServer", "servers": 1},
        "parts": [{"_target_": "worldsize.checkpoints.retention.Retention"}, "worldsize.engine"],
        "recipe": {"_target_": "recipes.digits.recipe.Digits"},
    }
    rename_targets(node)
    assert node == {
        "strategy": {"_target_": "plugins.parameter_server.strategy.ParameterServer", "servers": 1},
        "parts": [{"_target_": "worldsize.checkpoint.format.Retention"}, "worldsize.engine"],
        "recipe": {"_target_": "recipes.digits.recipe.Digits"},
    }
    assert current("worldsize.strategies.ddp.DDP") == "worldsize.strategies.ddp.DDP"


def test_a_configuration_may_name_a_target_as_before() -> None:
    node = {"_target_": "worldsize.strategies.parameter_server.strategy.ParameterServer"}
    strategy = build(node, Strategy, allowed=Allowed(), key="strategy")  # type: ignore[type-abstract]
    assert type(strategy).__module__ == "plugins.parameter_server.strategy"
