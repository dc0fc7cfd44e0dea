"""A configuration is loaded once: each object that it describes is built once, whatever must be computed before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from worldsize.config import settings
from worldsize.config.compose import compose_only
from worldsize.config.composed import settings_of
from worldsize.config.instantiate import build

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
        return build(node, kind, allowed=allowed, key=key)

    monkeypatch.setattr(settings, "build", counting)
    settings_of(compose_only([*WORDS, *words]))
    assert built.pop("recipe") == recipes
    assert built.keys() >= {"strategy", "launcher", "reproducibility", "checkpoint.keep", "numerics", "logger"}
    assert {*built.values()} == {1}
