"""A configuration is loaded once: each object is built once, whatever must be computed first."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from recipes.digits.recipe import Digits
from worldsize.config import settings
from worldsize.config.compose import compose_only
from worldsize.config.composed import build_settings
from worldsize.config.instantiate import build_object
from worldsize.errors import ConfigError

WORDS = ("recipe=digits", "strategy=local_sgd", "cluster.processes=2")


@pytest.mark.parametrize(
    ("words", "recipes"),
    [
        (("steps=3",), 1),
        (("steps=3", "cluster.scale_lr=linear", "cluster.base_batch=48"), 1),
        (("epochs=2",), 2),  # one for the length of its data
        (("epochs=2", "cluster.scale_lr=linear", "cluster.base_batch=48"), 2),
    ],
)
def test_each_object_is_built_once(words: tuple[str, ...], recipes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    built: Counter[str] = Counter()

    def counting(node: Any, kind: Any, *, allowed: Any, key: str) -> Any:
        built[key] += 1
        return build_object(node, kind, allowed=allowed, key=key)

    monkeypatch.setattr(settings, "build_object", counting)
    build_settings(compose_only([*WORDS, *words]))
    assert built.pop("recipe") == recipes
    assert built.keys() >= {"strategy", "launcher", "reproducibility", "checkpoint.keep", "numerics", "logger"}
    assert {*built.values()} == {1}


def test_values_that_follow_from_the_data_reach_every_section() -> None:
    words = [*WORDS, "strategy.inner_steps=${steps}", "epochs=2", "run.group=lr${lr}", "cluster.scale_lr=linear"]
    found = build_settings(compose_only(words))
    assert found.training.steps == 30  # 2 epochs of 15 steps
    assert found.strategy == replace(found.strategy, inner_steps=30)  # type: ignore[call-arg]
    assert found.run.group == f"lr{found.training.lr}"
    assert found.training.lr == 0.005 / 2  # each of two workers updates with half of a step's samples


def test_lengths_are_not_written_into_the_composed_configuration() -> None:
    cfg = compose_only([*WORDS, "epochs=2", "batch_size=null", "optimizer.lr=0.1", "cluster.scale_lr=linear"])
    before = deepcopy(cfg)
    assert build_settings(cfg).training.lr != 0.1
    assert cfg == before


def test_a_step_that_does_not_divide_is_refused_before_the_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Digits, "data", lambda *_: pytest.fail("the data are read"))
    with pytest.raises(ConfigError, match="batch_size=97 is not divisible by"):
        build_settings(compose_only([*WORDS, "epochs=2", "batch_size=97"]))
    with pytest.raises(ConfigError, match="do not share a loss scale"):
        build_settings(
            compose_only(["recipe=digits", "strategy=mesh", "cluster.processes=2", "epochs=2", "precision=fp16"])
        )


def test_the_batch_size_of_a_recipe_that_takes_it_is_known_before_its_data() -> None:
    found = build_settings(compose_only(["recipe=digits", "recipe.width=${batch_size}", "batch_size=null", "epochs=1"]))
    assert found.recipe == replace(found.recipe, width=found.training.batch_size)  # type: ignore[type-var]
