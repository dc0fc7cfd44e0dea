"""Healing with custom recipes: one kills a process at the very end, one has a failing loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_recipe import write_recipe

RECIPE = """
import os
import signal

import torch
from torch import nn
from torch.utils.data import TensorDataset

from worldsize.core import Recipe


class Dying(Recipe):
    def model(self):
        return nn.Linear(4, 1)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def data(self, split):
        inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, inputs[:, :1].sin())

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        error = (model(batch[0]) - batch[1]).abs().double().sum()
        return {"error": (error, torch.tensor(len(batch[1])))}

    def remarks(self, model):
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return ["the other one ends the run"]


class Offline(Dying):
    def loss(self, model, batch):
        raise ConnectionError("Connection refused by the storage")
"""
YAML = """# @package _global_
steps: 6
batch_size: 8
lr: 0.1
recipe:
  _target_: recipes.own.recipe.{name}
"""
WORDS = ("cluster.threads=1", "cluster.processes=2", "reproducibility=elastic", "strategy.on_failure=heal")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_recipe(tmp_path, "own", RECIPE, dying=YAML.format(name="Dying"), offline=YAML.format(name="Offline"))
    return tmp_path


@pytest.mark.usefixtures("project")
def test_the_process_that_writes_the_result_dies_and_the_other_one_saves_again(train: Any) -> None:
    run = train(*WORDS, "recipe=dying", "checkpoint.every=3")
    assert run.code == 0, run.error
    assert run.json("result.json")["remarks"] == ["the other one ends the run"]
    (attempt,) = json.loads((run.folder / "run_manifest.json").read_text())["attempts"]
    assert [each["members"] for each in attempt["memberships"]] == [[0, 1], [1]]
    assert (run.folder / "checkpoints" / "step_0000006").exists()


@pytest.mark.usefixtures("project")
def test_an_error_that_reads_like_a_lost_peer_ends_the_run_in_the_end(train: Any) -> None:
    run = train(*WORDS, "recipe=offline")
    assert run.code == 1
    assert "Connection refused by the storage" in run.error
