"""Several splits are evaluated and batches drawn again, with equal results at every world size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.own_recipe import write_recipe
from worldsize.checkpoint.format import complete, read_checkpoint
from worldsize.core import (
    ConfigError,
    World,
    format_display_name,
    format_logger_name,
    is_loss,
    metric_key,
    parse_metric_key,
)
from worldsize.data.loader import evaluation_batches

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worldsize.core import Recipe

SIZES = {"train": 101, "test": 23, "validation": 31}


def samples(split):
    inputs = torch.randn(SIZES[split], 4, generator=torch.Generator().manual_seed(SIZES[split]))
    return inputs, inputs[:, 0].sin()


class Split(Recipe):
    def model(self):
        return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def splits(self):
        return tuple(SIZES)

    def data(self, split):
        return TensorDataset(*samples(split))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        error = (model(batch[0]) - batch[1]).abs().double().sum()
        return {"error": (error, torch.tensor(len(batch[1]))), "noise": (torch.randn(()), torch.tensor(1))}


class Validated(Split):
    evaluation_split = "validation"
"""
YAML = """# @package _global_
# A recipe with three splits
steps: 8
batch_size: 8
lr: 0.1
evaluate_batch_size: 5
evaluation:
  splits: [test, validation]
recipe:
  _target_: recipes.split.recipe.Split
"""
OWN_SPLIT = "recipe._target_=recipes.split.recipe.Validated"  # a recipe whose own split is "validation"
WORDS = ("recipe=split", "cluster.threads=1", "reproducibility=elastic", "logical_ranks=4", "evaluate_every=2")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Write a recipe with three splits into the project of ``train``."""
    write_recipe(tmp_path, "split", RECIPE, split=YAML)
    return tmp_path


def evaluations(run: Any) -> dict[int, dict[str, float]]:
    assert run.code == 0, run.error
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["metrics"] for row in rows if row["event"] == "evaluation"}


def weights_of(run: Any, step: int) -> dict[str, torch.Tensor]:
    from worldsize.checkpoint.load import read_tensors

    return read_tensors(read_checkpoint(run.folder / "checkpoints" / f"step_{step:07d}"), "model")


def by_hand(weights: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> float:
    predicted = inputs @ weights["0.weight"][0] + weights["0.bias"]
    return float((predicted - targets).abs().double().mean())


@pytest.mark.parametrize(("every", "direction"), [("2", "min"), ("auto", "max")])
@pytest.mark.usefixtures("project")
def test_each_split_is_evaluated_under_its_name_and_checkpoints_are_kept_by_it(
    train: Any, every: str, direction: str
) -> None:
    kept = (f"checkpoint.every={every}", "checkpoint.keep.last=1", f"checkpoint.keep.direction={direction}")
    run = train(*WORDS, *kept, "checkpoint.keep.best=validation/error", "cluster.processes=2", "strategy=ddp")
    metrics = evaluations(run)
    assert all(each.keys() == {"error", "noise", "validation/error", "validation/noise"} for each in metrics.values())
    names: dict[str, Any] = {}
    exec(RECIPE, names)
    for path in complete(run.folder / "checkpoints"):
        step = read_checkpoint(path).step
        for split, key in (("test", "error"), ("validation", "validation/error")):
            expected = by_hand(weights_of(run, step), *names["samples"](split))
            assert metrics[step][key] == pytest.approx(expected, rel=1e-6)
    sign = 1 if direction == "min" else -1
    best = min(metrics, key=lambda step: (sign * metrics[step]["validation/error"], -step))
    assert direction == "min" or best < 8
    assert {step for path in complete(run.folder / "checkpoints") for step in [read_checkpoint(path).step]} == {best, 8}
    assert f"validation: error {metrics[8]['validation/error']:.4f}" in run.output
    assert run.json("result.json")["metrics"] == metrics[8]
    servers = train(*WORDS, "cluster.processes=3", "strategy=parameter_server")
    assert evaluations(servers) == metrics


@pytest.mark.usefixtures("project")
def test_batches_drawn_anew_are_the_same_at_every_world_size_and_after_a_resume(train: Any) -> None:
    drawn = (*WORDS, "evaluation.batches=3", "evaluation.splits=[validation,train]", "checkpoint.every=3")
    alone = train(*drawn, "cluster.processes=1", "strategy=single", "checkpoint.keep.last=9")
    expected = evaluations(alone)
    assert expected.keys() == {2, 4, 6, 8}
    assert expected[8].keys() == {"validation/error", "validation/noise", "train/error", "train/noise"}
    assert len({each["train/noise"] for each in expected.values()} | {expected[8]["validation/noise"]}) == 5
    names: dict[str, Any] = {}
    exec(RECIPE, names)
    weights = weights_of(alone, 6)
    whole = by_hand(weights, *names["samples"]("validation"))
    assert expected[6]["validation/error"] != pytest.approx(whole, rel=1e-6), "it is an estimate"
    killed = ("faults=[{action: kill, rank: 1, step: 6}]", "launcher.max_restarts=1")
    assert evaluations(train(*drawn, "cluster.processes=2", "strategy=ddp", *killed)) == expected
    assert evaluations(train(*drawn, "cluster.processes=3", "strategy=parameter_server")) == expected


def test_drawn_batches_are_of_the_whole_set_in_the_end_and_others_each_time() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(100))

    def drawn(seed: int, size: int) -> dict[int, list[int]]:
        worlds = [World("worker", rank, size, rank, size, rank, 0, torch.device("cpu")) for rank in range(size)]
        shares = [evaluation_batches(dataset, w, batch_size=8, drawn=5, seed=seed) for w in worlds]
        return {each.index: each.data[0].tolist() for share in shares for each in share if each.counted}

    assert drawn(1, 1) == drawn(1, 2) == drawn(1, 4)
    assert drawn(1, 1) != drawn(2, 1)
    assert {len(batch) for batch in drawn(1, 1).values()} == {8}
    assert {row for seed in range(40) for batch in drawn(seed, 1).values() for row in batch} == set(range(100))


def test_a_stream_cannot_be_drawn_from() -> None:
    world = World.create_single(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"Set evaluation\.batches=null"):
        list(evaluation_batches(iter([1, 2]), world, batch_size=1, drawn=1))


@pytest.mark.usefixtures("project")
def test_a_recipe_names_the_split_that_it_evaluates(train: Any) -> None:
    best = ("checkpoint.every=2", "checkpoint.keep.best=validation/error", "checkpoint.keep.direction=min")
    own = train(*WORDS, OWN_SPLIT, "evaluation.splits=[]", *best, "cluster.processes=1")
    assert own.code == 0, own.error
    assert own.json("result.json")["metrics"].keys() == {"validation/error", "validation/noise"}
    assert "step 8  validation: error " in own.output
    assert "validation error" in own.output
    assert "test" not in own.output.replace("pytest", "").replace("test_", "")
    named = train(*WORDS, "evaluation.splits=[validation]", "cluster.processes=1")
    assert named.json("result.json")["metrics"] == own.json("result.json")["metrics"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("evaluation.splits=[test,validatoin]",), "no split 'validatoin'; did you mean 'validation'?"),
        (("evaluation.splits=[test,test]",), "must not have duplicates"),
        (("evaluation.splits=[a/b]",), "invalid split name"),
        (("evaluation.batches=0",), "evaluation.batches"),
        (("evaluation.splits=[validation]", "checkpoint.keep.best=error"), "checkpoint.keep.best=validation/error"),
        ((OWN_SPLIT, "evaluation.splits=[]", "early_stopping.metric=error"), "early_stopping.metric=validation/error"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("project")
def test_splits_that_do_not_exist_are_refused_before_the_start(train: Any, words: tuple[str, ...], said: str) -> None:
    run = train(*WORDS, *words)
    assert (run.code, run.folder) == (2, None)
    assert said in run.error


@pytest.mark.parametrize(
    ("split", "name", "key", "logged", "spoken"),
    [
        ("test", "loss", "loss", "test/loss", "test loss"),
        ("validation", "loss", "validation/loss", "validation/loss", "validation loss"),
        ("train", "loss", "train/loss", "evaluation/train/loss", "evaluation train loss"),
        ("test", "top/5", "test/top/5", "test/top/5", "test top/5"),
        ("validation", "top/5", "validation/top/5", "validation/top/5", "validation top/5"),
        ("test", "ema/loss", "ema/loss", "test/ema/loss", "test ema/loss"),
        ("validation", "ema/loss", "ema/validation/loss", "validation/ema/loss", "validation ema/loss"),
    ],
)
def test_a_metric_is_named_by_its_split(split: str, name: str, key: str, logged: str, spoken: str) -> None:
    assert metric_key(split, name) == key
    assert parse_metric_key(key) == (split, name)
    assert format_logger_name(key) == logged
    assert format_display_name(key) == spoken


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("loss", True), ("validation/loss", True), ("ema/loss", True), ("evaluation/train/loss", True)),
        *(("accuracy", False), ("val_loss", False), ("loss/accuracy", False), ("sum of loss", False)),
    ],
)
def test_a_metric_named_loss_in_any_split_is_a_loss(name: str, expected: bool) -> None:
    assert is_loss(name) is expected
