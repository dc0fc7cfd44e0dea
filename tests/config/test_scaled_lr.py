"""The learning rate scales with an update's samples only where they depend on the number of workers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from worldsize.config.learning_rate import rate_factor

DIGITS = ("recipe=digits", "recipe.width=4", "steps=2", "log_every=1", "cluster.threads=1", "batch_size=96")
PLAIN = (*DIGITS, "optimizer=sgd", "schedule=constant", "lr=0.02")
SHOWN = ("recipe=digits", "batch_size=96", "lr=0.02", "launch=show")


@pytest.mark.parametrize(("samples", "base"), [(8192, 256), (12, 96), (7, 7)])
def test_the_factors_are_those_of_the_papers(samples: int, base: int) -> None:
    """Goyal et al. 2017: lr = 0.1 k n / 256. Hoffer et al. 2017: keep the update's noise, σ² lr² / batch, constant."""
    assert 0.1 * rate_factor("linear", samples=samples, base=base) == pytest.approx(0.1 * samples / base)
    rate = 0.1 * rate_factor("sqrt", samples=samples, base=base)
    assert rate**2 / samples == pytest.approx(0.1**2 / base)
    assert rate_factor("none", samples=samples, base=base) == 1


@pytest.mark.parametrize(
    ("shape", "rule", "lr", "samples"),
    [
        ("strategy=local_sgd cluster.processes=2", "cluster.scale_lr=linear", 0.01, 48),
        ("strategy=easgd strategy.period=1 cluster.processes=3", "cluster.scale_lr=sqrt", 0.02 / math.sqrt(2), 48),
        ("strategy=ddp cluster.processes=2", "cluster.scale_lr=linear cluster.base_batch=48", 0.04, 96),
    ],
    ids=["local_sgd", "easgd", "ddp with another batch"],
)
def test_a_scaled_run_is_the_run_with_the_rate_by_the_formula(
    train: Any, shape: str, rule: str, lr: float, samples: int
) -> None:
    run = train(*PLAIN, *shape.split(), *rule.split())
    assert run.code == 0, run.error
    assert [(row["lr"], row["update_samples"]) for row in run.steps()] == [(pytest.approx(lr), samples)] * 2
    assert f"global batch {samples} " in run.output
    by_hand = train(*PLAIN, *shape.split(), f"lr={run.steps()[0]['lr']!r}")
    assert by_hand.json("result.json")["state_digest"] == run.json("result.json")["state_digest"]


def test_a_run_goes_on_with_other_workers_at_the_rate_of_their_updates_once_that_is_accepted(
    train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    run = train(*DIGITS, "lr=0.02", "strategy=local_sgd", "cluster.processes=2", "cluster.scale_lr=linear")
    words = ("resume", str(run.folder), "cluster.processes=3", "steps=4")
    refused = command(*words, cwd=run.folder, environment=environment_without_wandb)
    assert refused.returncode == 2
    assert "lr: 0.01 -> 0.006666666666666666" in refused.stderr
    resumed = command(*words, "--ignore", "lr", cwd=run.folder, environment=environment_without_wandb)
    assert resumed.returncode == 0, resumed.stderr
    assert "global batch 32 (batch_size=96 / 3 workers) · lr 0.00666667 = 0.02 × 32/96" in resumed.stdout
    assert [row["update_samples"] for row in run.steps()] == [48, 48, 32, 32]
    peaks = [0.01, 0.01, 0.02 / 3, 0.02 / 3]  # multiplied by the schedule's cosine
    undisturbed = train(*DIGITS, "lr=1", "steps=4")
    shares = [row["lr"] for row in undisturbed.steps()]
    assert [row["lr"] for row in run.steps()][2:] == pytest.approx(
        [peak * share for peak, share in zip(peaks, shares, strict=True)][2:]
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("strategy=ddp cluster.processes=3", "global batch 96 = 3 processes × 32 · lr 0.02\n"),
        (
            "strategy=diloco cluster.processes=4 cluster.scale_lr=sqrt cluster.base_batch=48",
            "global batch 24 (batch_size=96 / 4 workers) · lr 0.0141421 = 0.02 × √(24/48) (cluster.scale_lr=sqrt)\n",
        ),
        ("strategy=local_sgd cluster.processes=4", "lr 0.02 with any number of workers (cluster.scale_lr=none)\n"),
        (
            "strategy=parameter_server strategy.consistency=async cluster.processes=3",
            "global batch 48 (batch_size=96 / 2 logical ranks) · lr 0.02, divided among the updates\n",
        ),
        ("strategy=parameter_server cluster.processes=3", "global batch 96 · lr"),
    ],
    ids=["ddp", "diloco", "local_sgd", "asynchronous servers", "synchronous servers"],
)
def test_what_an_update_has_is_shown_before_the_start(train: Any, words: str, text: str) -> None:
    assert text in train(*SHOWN, *words.split()).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("strategy=ddp cluster.scale_lr=linear", "has no effect with DDP: an update has batch_size=96 samples"),
        (
            "strategy=parameter_server strategy.consistency=async cluster.processes=3 cluster.scale_lr=linear",
            "has no effect with ParameterServer: a step (each update with a part of lr)",
        ),
        ("cluster.base_batch=48", "Set cluster.scale_lr=linear or sqrt, or remove cluster.base_batch."),
        ("cluster.scale_lr=cubic", "Available: linear, none, sqrt"),
        ("cluster.scale_lr=linear cluster.base_batch=0", "cluster.base_batch=0 must be 1 or more"),
    ],
)
def test_a_rule_without_a_meaning_is_refused(train: Any, words: str, message: str) -> None:
    run = train(*SHOWN, *words.split())
    assert (run.code, run.folder) == (2, None)
    assert message in run.error
