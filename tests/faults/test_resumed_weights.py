"""A resumed process draws no weights that its checkpoint has, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_recipe import write_recipe

pytestmark = pytest.mark.heavy

RECIPE = """
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from worldsize.strategies.deferred.tape import TapedCall
from worldsize.testing.recipes import Chain


class First(nn.Linear):
    def __init__(self):
        noise = torch.rand(16) / 9  # in no checkpoint, and so are what is made of it and what the optimizer draws
        super().__init__(7, 16)
        self.register_buffer("noise", noise, persistent=False)
        self.shift = self.noise * 2
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.register_buffer("kept", torch.rand(16))
        self.scale = 1.0

    def forward(self, inputs):
        return (super().forward(inputs) + self.noise + self.frozen + self.kept + self.shift) * self.scale


@dataclass(frozen=True)
class Own(Chain):
    def model(self):
        first, last = First(), nn.Linear(16, 3)
        _, *blocks, _ = _unseeded(super().model)
        blocks[0].norm.bias = blocks[0].norm.weight
        return nn.Sequential(first, *blocks, last)

    def optimizer(self, model):
        for module in model.modules():
            if isinstance(module, First):
                module.scale = 1 + float(torch.rand(()))
        return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)


def _unseeded(make):
    seed, torch.manual_seed = torch.manual_seed, lambda seed: None
    try:
        return make().children()
    finally:
        torch.manual_seed = seed


def counted(name):
    done = getattr(TapedCall, name)

    def count(self, *args):
        if self.generator is not None:
            with Path("draws", str(os.getpid())).open("a") as file:
                file.write("x")
        return done(self, *args)

    setattr(TapedCall, name, count)


counted("run")
counted("draw_in_vain")
"""
YAML = """# @package _global_
steps: 8
batch_size: 16
lr: 0.01
recipe:
  _target_: recipes.own.recipe.Own
"""
WORDS = ("recipe=own", "cluster.threads=1", "reproducibility=elastic", "logical_ranks=4", "ema.decay=0.9")
KILL = "faults=[{action: kill, rank: 1, step: 7}]"  # step 4 is saved by then
SAVES = ("checkpoint.every=2", "checkpoint.keep.last=2", KILL)
EQUAL = ("state_digest", "metrics_digest", "metrics")


def write_project(folder: Path) -> None:
    write_recipe(folder, "own", RECIPE, own=YAML)
    (folder / "draws").mkdir()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def expected(train_in: Callable[[Path], Any], once: Callable[..., Path]) -> dict[str, Any]:
    """The results of an undisturbed run in one process that builds its model at once."""

    def fill(folder: Path) -> None:
        write_project(folder)
        trained = train_in(folder)(*WORDS, "cluster.processes=1")
        assert trained.code == 0, trained.error

    (result,) = once("resumed weights", fill).rglob("result.json")
    return {key: json.loads(result.read_text())[key] for key in EQUAL}


def draws(project: Path) -> list[int]:
    """Return the number of draws of each process that drew, in order of their number."""
    return sorted(len(file.read_text()) for file in (project / "draws").iterdir())


@pytest.mark.parametrize(
    ("words", "drawn"),
    [
        (("strategy=fsdp", "cluster.processes=2"), [2, 2]),
        (("strategy=hsdp", "strategy.shard=2", "cluster.processes=4"), [2, 2, 2, 2]),
        (("strategy=mesh", "strategy.pipeline=2", "cluster.processes=2"), [1, 2]),  # the last stage: only for `shift`
    ],
    ids=["fsdp", "hsdp", "mesh"],
)
def test_a_new_attempt_draws_only_what_no_checkpoint_has(
    project: Path, train: Any, expected: dict[str, Any], words: tuple[str, ...], drawn: list[int]
) -> None:
    """``drawn``: how often each process draws the noise, once for itself and once for the weight made from it."""
    run = train(*WORDS, *words, *SAVES, "launcher.max_restarts=1")
    assert run.code == 0, run.error
    assert {key: run.json("result.json")[key] for key in EQUAL} == expected
    again, first = draws(project)[: len(drawn)], draws(project)[len(drawn) :]
    assert again == drawn
    assert all(each > 10 for each in first)


@pytest.mark.parametrize("damage", ["the newest", "all"])
def test_a_run_whose_checkpoints_are_damaged_goes_on_from_an_older_one_or_draws_anew(
    project: Path,
    train: Any,
    command: Any,
    environment_without_wandb: dict[str, str],
    expected: dict[str, Any],
    damage: str,
) -> None:
    run = train(*WORDS, "strategy=fsdp", "cluster.processes=2", *SAVES)
    assert run.code == 1
    *_, older, newest = sorted((run.folder / "checkpoints").glob("step_*"))
    shard = newest / "rank_00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    shutil.rmtree(project / "draws")
    (project / "draws").mkdir()
    if damage == "all":
        shutil.rmtree(older)
        words = ("resume", str(run.folder), "--allow-older")
        refused = command(*words, cwd=project, environment=environment_without_wandb)
        assert refused.returncode == 1
        assert draws(project) == []
        shutil.rmtree(newest)
    anew = ("resume", str(run.folder), "faults=[]", "--allow-older")
    done = command(*anew, cwd=project, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert {key: run.json("result.json")[key] for key in EQUAL} == expected
    if damage == "all":
        assert all(each > 10 for each in draws(project))
    else:
        assert draws(project) == [2, 2]
