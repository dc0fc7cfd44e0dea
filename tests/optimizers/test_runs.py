"""Optimizers with groups have the same bits on one process and on two, and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes.digits.recipe import Digits
from tests.support.runs import Command, Train, environment

pytestmark = pytest.mark.heavy

GROUPS = 'optimizer.groups={bias:{match:["*.bias"],weight_decay:0.0,lr:0.002}}'
MUON = ("optimizer=muon", GROUPS)
EIGHT_BITS = ("optimizer=adamw_8bit", "optimizer.compile=false", "recipe.width=32", GROUPS)
SCHEDULE_FREE = ("optimizer=adamw_schedule_free", "optimizer.warmup_steps=2", "evaluate_every=2")


@pytest.mark.parametrize(
    ("optimizer", "strategy"),
    [(MUON, "zero"), (EIGHT_BITS, "zero"), (EIGHT_BITS, "ddp"), (SCHEDULE_FREE, "ddp"), (SCHEDULE_FREE, "fsdp")],
)
def test_an_optimizer_keeps_the_bits_on_two_processes_and_when_another_strategy_resumes(
    train: Train,
    command: Command,
    tmp_path: Path,
    environment_without_wandb: dict[str, str],
    optimizer: tuple[str, ...],
    strategy: str,
) -> None:
    options = (
        *(*optimizer, "steps=6", "recipe=digits", "schedule=constant"),
        *("reproducibility=elastic", "logical_ranks=2", "cluster.threads=1"),
    )
    whole = train(*options, "strategy=single", "cluster.processes=1")
    half = train(*options, f"strategy={strategy}", "cluster.processes=2", "steps=3")
    assert (whole.code, half.code) == (0, 0), (whole.error, half.error)
    words = ("resume", str(half.folder), "steps=6", "strategy=ddp")
    done = command(*words, cwd=tmp_path, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    first, second = (run.json("result.json") for run in (whole, half))
    assert second["state_digest"] == first["state_digest"]
    if optimizer is SCHEDULE_FREE:
        assert second["metrics"]["loss"] == pytest.approx(first["metrics"]["loss"], rel=1e-6)
        exported = command("export", str(half.folder), "--format", "torch", cwd=tmp_path, environment=environment())
        assert exported.returncode == 0, exported.stderr
        weights = torch.load(exported.stdout.strip(), weights_only=True)
        assert evaluated(weights) == pytest.approx(second["metrics"]["loss"], rel=1e-5)


@torch.no_grad()
def evaluated(weights: dict[str, torch.Tensor]) -> float:
    """Return the mean loss of a model with these weights on the test data, in plain PyTorch."""
    recipe = Digits(16, 0.0, torch.optim.SGD)
    model = recipe.model().eval()
    model.load_state_dict(weights)
    images, labels = recipe.data("test").tensors
    return float(torch.nn.functional.cross_entropy(model(images), labels))


def test_fsdp_refuses_muon_before_the_start(train: Train) -> None:
    run = train("recipe=digits", "optimizer=muon", "strategy=fsdp", "cluster.processes=2")
    assert (run.code, run.folder) == (2, None)
    assert "requires whole matrices" in run.error
