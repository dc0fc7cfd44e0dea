"""Data that come in batches do not need ``batch_size``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import REPOSITORY, files
from tests.support.runs import Command, environment
from worldsize.cli.scale import plan_points
from worldsize.plan.predictor import Given, Predictor
from worldsize.testing import compose_recipe


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with the recipe from the page."""
    for name, text in files(REPOSITORY / "docs" / "howto" / "data.md").items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)


def test_a_step_takes_a_batch_for_each_logical_rank(project: None, train: Any) -> None:
    digests = set()
    for processes in (1, 2):
        options = ("logical_ranks=4", "reproducibility=elastic", f"cluster.processes={processes}")
        run = train("recipe=walks", "epochs=1", *options)
        assert run.code == 0, run.error
        result = run.json("result.json")
        assert (result["steps"], result["samples"]) == (10, 40)
        digests.add(result["state_digest"])
    assert len(digests) == 1


def test_scale_gives_each_micro_batch_a_batch(project: None) -> None:
    words = ["recipe=walks", "world_sizes=2", "accumulations=3"]
    (point,) = plan_points(words, "weak", Predictor(Given(compute_seconds=0.01)))
    assert point.settings.training.batch_size == point.settings.logical_ranks == 6
    assert "batch_size=null" in point.words


def test_scale_takes_epochs_in_place_of_its_own_steps(project: None) -> None:
    words = ["recipe=walks", "world_sizes=1", "epochs=2"]
    (point,) = plan_points(words, "strong", Predictor(Given(compute_seconds=0.01)))
    assert point.settings.training.steps == 80


def test_a_run_goes_on_with_as_many_batches_a_step_on_other_processes(
    project: None, train: Any, command: Command, tmp_path: Path
) -> None:
    begun = train("recipe=walks", "steps=4", "cluster.processes=1", "checkpoint.every=2", "logical_ranks=2")
    assert begun.code == 0, begun.error
    words = ("resume", str(begun.folder), "steps=6", "cluster.processes=2")
    resumed = command(*words, cwd=tmp_path, environment=environment())
    assert resumed.returncode == 0, resumed.stderr
    assert begun.json("result.json")["samples"] == 12


def test_a_port_compares_one_batch_a_step(project: None) -> None:
    _, config = compose_recipe("recipe=walks")
    assert (config.batch_size, config.micro_batches) == (1, 1)
