"""``worldsize compare --operations`` trains two runs again, and names the first operation that differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_recipe import write_recipe
from tests.support.runs import Run, Train, environment

pytestmark = pytest.mark.heavy

Compare = Callable[..., Any]
DIGITS = ("recipe=digits", "steps=4", "strategy=single", "cluster.processes=1", "log_every=1")

# a recipe whose loss changes its operation at step ``switch``
RECIPE = """
import torch
from torch.utils.data import TensorDataset
from worldsize.core import Recipe

class Switched(Recipe):
    def __init__(self, switch: int) -> None:
        self.switch = switch
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    def data(self, split):
        return TensorDataset(torch.arange(64.0).view(-1, 2) / 7)
    def loss_at(self, model, batch, step):
        outputs = model(*batch)
        if step < self.switch:
            return outputs.square().mean()
        return outputs.abs().mean()
    def loss(self, model, batch):
        return self.loss_at(model, batch, 0)
    def evaluate(self, model, batch):
        return {"error": (model(*batch).double().sum(), torch.tensor(len(batch[0])))}
"""
CONF = """# @package _global_
steps: 6
batch_size: 8
lr: 0.1
recipe:
  _target_: recipes.switched.recipe.Switched
  switch: 100
"""


@pytest.fixture
def compare(tmp_path: Path, command: Any, warm_python: Path) -> Compare:
    """``compare(first, second, ...)`` compares two runs' operations in a separate folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(first: Run, second: Run, *options: str, **changes: str) -> Any:
        words = ("compare", "--operations", str(first.folder), str(second.folder), *options)
        return command(*words, cwd=elsewhere, environment=environment(**changes), timeout=600, python=warm_python)

    return run


def test_changed_dropout_of_digits_is_named_with_its_module_and_line(
    compare: Compare, reference_run: Callable[..., Run]
) -> None:
    first, second = (reference_run(*DIGITS, f"recipe.dropout={rate}") for rate in (0.2, 0.25))
    done = compare(first, second, "--json")
    assert done.returncode == 4, done.stderr
    report = json.loads(done.stdout)
    found = report["difference"]
    assert (found["step"], found["kind"], report["remarks"]) == (1, "result", [])
    assert [found[run]["arguments"] for run in ("first", "second")] == ["p=0.8", "p=0.75"]
    for operation in (found["first"], found["second"]):
        assert (operation["name"], operation["module"]) == ("aten.bernoulli_.float", "6")
        file, _, number = operation["line"].rpartition(":")
        source = (Path(__file__).parents[2] / "recipes" / "digits" / "recipe.py").read_text().splitlines()
        assert file.endswith("recipes/digits/recipe.py")
        assert "model(images)" in source[int(number) - 1]


def test_the_first_step_is_found_between_logged_steps_at_another_world_size(
    tmp_path: Path, train: Train, compare: Compare
) -> None:
    source = write_recipe(tmp_path, "switched", RECIPE, switched=CONF) / "recipe.py"
    options = ["recipe=switched", "reproducibility=elastic", "logical_ranks=4", "log_every=10"]
    options += ["checkpoint.every=2", "checkpoint.keep.last=9"]
    first = train(*options, "cluster.processes=1")
    second = train(*options, "cluster.processes=2", "recipe.switch=3")
    assert [step["step"] for step in second.steps()] == [1, 6]
    done = compare(first, second)
    assert done.returncode == 4, done.stderr
    assert "step 3, logical rank 0: the runs perform different operations from here on" in done.stdout
    for name in ("aten.pow.Tensor_Scalar", "aten.abs.default"):
        assert name in done.stdout
    for number, text in enumerate(source.read_text().splitlines(), 1):
        if ".mean()" in text:
            assert f"recipes/switched/recipe.py:{number}" in done.stdout
    assert "again up to step 4" in done.stderr, "the checkpoints of step 4 differ"


def test_equal_runs_are_not_trained_again(compare: Compare, reference_run: Callable[..., Run]) -> None:
    first = reference_run(*DIGITS, "recipe.dropout=0.2")
    done = compare(first, first)
    assert done.returncode == 0, done.stderr
    assert "bitwise identical; nothing was trained" in done.stdout


def test_runs_that_differ_only_by_a_fault_are_not_reproduced(
    train: Train, compare: Compare, reference_run: Callable[..., Run]
) -> None:
    options = (*DIGITS, "recipe.dropout=0.2", "reproducibility=elastic", "logical_ranks=2")
    first = reference_run(*options)
    flip = "faults=[{action: flip, target: weight, rank: 0, step: 2, bit: 20}]"
    second = train(*options, flip, "logger.project=not-published", logger="wandb")
    assert second.code == 0, second.error
    done = compare(first, second, "--json")
    assert done.returncode == 4, done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"], report["difference"]) == ("not reproduced", None)
    assert "the recorded runs differ, but training again gave equal results" in report["remarks"]
    assert any("repeating it gave a different" in remark for remark in report["remarks"])


def test_options_that_do_not_fit_operations_are_refused(
    command: Any, compare: Compare, reference_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = reference_run(*DIGITS, "recipe.dropout=0.2")
    refused = compare(run, run, "--tolerance=0.5")
    assert (refused.returncode, "--tolerance is not supported with --operations" in refused.stderr) == (2, True)
    words = ("compare", "--yes", str(run.folder), str(run.folder))
    refused = command(*words, cwd=tmp_path, environment=environment())
    assert (refused.returncode, "--yes requires --operations" in refused.stderr) == (2, True)


def test_what_cannot_be_compared_is_refused_in_a_sentence(
    train: Train, compare: Compare, reference_run: Callable[..., Run], tmp_path: Path
) -> None:
    first, second = (reference_run(*DIGITS, f"recipe.dropout={rate}") for rate in (0.2, 0.25))
    for options, reason in (
        (("strategy=fsdp", "cluster.processes=2"), "with the strategy FSDP"),
        (("compile=true",), "with compile=true"),
    ):
        refused = train("steps=2", "profile.operations=1", *options)
        assert (refused.code, refused.folder) == (2, None)
        assert f"operations cannot be compared {reason}" in refused.error
        assert "Train both runs with" in refused.error
    home = tmp_path / "another home"
    home.mkdir()
    asked = compare(first, second, HOME=str(home), XDG_CONFIG_HOME=str(home / ".config"))
    assert asked.returncode == 2
    assert "--yes" in asked.stderr
