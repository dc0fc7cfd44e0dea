"""A value typed without effect is refused, and an optimizer's own learning rate is the run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_recipe import write_recipe

PLAIN = ("recipe=digits", "recipe.width=4", "steps=2", "cluster.threads=1", "cluster.processes=1", "schedule=constant")
SHOWN = ("recipe=digits", "launch=show")


def test_the_optimizers_own_rate_is_recorded_as_the_runs_rate(train: Any) -> None:
    run, same = train(*PLAIN, "optimizer.lr=0.1"), train(*PLAIN, "lr=0.1")
    assert run.code == same.code == 0, run.error
    assert "lr 0.1\n" in run.output
    assert [row["lr"] for row in run.steps()] == [0.1, 0.1]
    config = json.loads((run.folder / "run_manifest.json").read_text())["config"]
    assert (config["lr"], config["optimizer"]["lr"]) == (0.1, 0.1)
    assert run.json("result.json")["state_digest"] == same.json("result.json")["state_digest"]


def test_the_optimizers_own_rate_is_scaled_as_the_runs_rate_is(train: Any) -> None:
    words = "optimizer.lr=0.02 batch_size=96 strategy=local_sgd cluster.processes=4 cluster.scale_lr=linear"
    assert "lr 0.005 = 0.02 × 24/96 (cluster.scale_lr=linear)" in train(*SHOWN, *words.split()).output


def test_a_typed_value_counts_although_the_recipe_sets_it_for_the_numerics(train: Any, tmp_path: Path) -> None:
    text = "# @package _global_\ndefaults: [digits, _self_]\nnumerics: {clip_norm: 1.0}\n"
    write_recipe(tmp_path, "clipped", "", clipped=text)
    words = ("recipe=clipped", *PLAIN[1:])
    norms = [
        train(*words, *typed).json("run_manifest.json")["config"]["numerics"]["clip_norm"]
        for typed in ((), ("clip_norm=0.5",))
    ]
    assert norms == [1.0, 0.5]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lr=0.1 optimizer.lr=0.2", "lr=0.1 conflicts with optimizer.lr=0.2. Set only one of them."),
        ("clip_norm=1 numerics.clip_norm=2", "clip_norm=1 and numerics.clip_norm=2 are mutually exclusive; pass one"),
        ("ema.every=3", "ema.every=3 has no effect without ema.decay. Also set ema.decay=0.999, or remove ema.every."),
        ("ema.decay=1.0", "ema.decay=1.0 never updates the average. Set a value below 1"),
        ("early_stopping.patience=2", "has no effect without early_stopping.metric."),
        ("shuffle.enabled=false shuffle.block=8", "shuffle.block=8 has no effect without shuffle.enabled."),
        ("compile_mode=max-autotune", "compile_mode=max-autotune has no effect without compile."),
        ("init_from_strict=false", "init_from_strict=false has no effect without init_from."),
        ("run.evaluates=a\u202eb", r"a\u202eb' is reserved for `worldsize evaluate`. Run that command"),
        ("run.evaluates=zz", "run.evaluates=zz is reserved for `worldsize evaluate`. Run that command"),
        ("run.examine=tiers", "run.examine=tiers is reserved for `worldsize doctor`. Run that command"),
    ],
)
def test_a_typed_value_without_an_effect_is_refused(train: Any, words: str, message: str) -> None:
    run = train(*SHOWN, *words.split())
    assert (run.code, run.folder) == (2, None)
    assert message in run.error


def test_a_rate_that_nothing_in_the_run_takes_is_refused(train: Any, tmp_path: Path) -> None:
    text = "# @package _global_\n# own\nsteps: 2\nbatch_size: 4\nrecipe: {_target_: worldsize.testing.recipes.Chain}\n"
    write_recipe(tmp_path, "own", "", own=text)
    own = ("recipe=own", "launch=show", "allow_targets=[worldsize.testing]")
    assert train(*own).code == 0
    for word in ("lr=0.1", "optimizer=sgd"):
        run = train(*own, word)
        assert (run.code, f"{word} has no effect: this run does not use" in run.error) == (2, True), run.error


@pytest.mark.parametrize("words", ["ema.decay=0.9 ema.every=3", "ema.decay=1.0 ema.warmup=true", "optimizer=sgd"])
def test_a_typed_value_with_an_effect_is_taken(train: Any, words: str) -> None:
    run = train(*SHOWN, *words.split())
    assert run.code == 0, run.error
