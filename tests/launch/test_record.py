"""The record of a run contains everything that determines its result; a resumed run reports later changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from worldsize.core import ConfigError
from worldsize.data.permutation import ORDER
from worldsize.launch.record import check_same
from worldsize.record.inputs import fingerprint
from worldsize.record.redaction import Scrubber


@pytest.mark.parametrize(
    ("recorded", "size", "is_told"),
    [({}, 5 << 20, True), ({"order": 1}, 5 << 20, True), ({"order": ORDER}, 5 << 20, False), ({}, 1 << 20, False)],
)
def test_a_run_begun_with_another_order_of_many_samples_is_told_so(
    recorded: dict[str, int], size: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens.bin"
    with file.open("wb") as begun:
        begun.truncate(size)
    recipe = SimpleNamespace(files=lambda: {"tokens": file}, fingerprints=dict)
    settings = SimpleNamespace(config={}, recipe=recipe, initial=None)
    record = SimpleNamespace(manifest={"config": {}, "data": fingerprint(recipe.files()), "determinism": recorded})
    check_same(cast("Any", settings), cast("Any", record), Scrubber(()), ())
    assert ("the sample order has changed from version 1" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("key", "guess"),
    [
        ("learning_rate", None),
        ("recipe.widht", "recipe.width"),
        ("recipes", "recipe"),
        ("optimiser", "optimizer"),
        ("hyperparameter", "hyperparameters"),
        ("date", "data"),
    ],
)
def test_a_misspelt_key_to_ignore_is_refused_and_its_neighbour_named(key: str, guess: str | None) -> None:
    recipe = SimpleNamespace(files=dict, fingerprints=dict)
    now, then = {"lr": 0.1, "recipe": {"width": 8}}, {"lr": 0.2, "recipe": {"width": 4}, "old": {}}
    settings = SimpleNamespace(config=now, recipe=recipe, initial=None)
    record = SimpleNamespace(manifest={"config": then, "data": fingerprint({}), "determinism": {"order": ORDER}})
    check = partial(check_same, cast("Any", settings), cast("Any", record), Scrubber(()))
    check(["lr", "recipe.width", "recipe", "old", "data", "hyperparameters"])
    with pytest.raises(ConfigError) as refused:
        check(["lr", "recipe", key])
    assert str(refused.value).startswith(f"--ignore {key}: unknown key")
    assert guess is None or f"did you mean {guess!r}?" in str(refused.value)
