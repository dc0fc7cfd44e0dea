"""Schedule lengths in epochs, samples and tokens are converted to steps before the start."""

from __future__ import annotations

from typing import Any

import pytest

from worldsize.config.composed import find_lengths


def test_texts_that_are_lengths_are_told_from_others_at_any_depth() -> None:
    node = {"_target_": "torch.steps", "warmup": 0.1, "milestones": ["2 epochs", 3], "floor": {"at": "1.5M tokens"}}
    lengths = {key: (length.count, length.unit) for key, length in find_lengths(node)}
    assert lengths == {"schedule.milestones.0": (2, "epoch"), "schedule.floor.at": (1.5e6, "token")}


SHOWN = ("launch=show", "cluster.processes=1", "steps=99")


@pytest.mark.parametrize(
    ("text", "steps", "options"),
    [
        ("2 epochs", 30, ("recipe=digits", "batch_size=96")),  # 1437 samples
        ("1k samples", 11, ("recipe=digits", "batch_size=96")),
        ("7 steps", 7, ("recipe=digits",)),
        ("2k tokens", 16, ("recipe=stdlib_lm", "recipe.context=32", "batch_size=4")),
    ],
    ids=lambda value: str(value).replace(" ", "_"),
)
def test_lengths_are_shown_in_steps(train: Any, text: str, steps: int, options: tuple[str, ...]) -> None:
    run = train(*SHOWN, *options, f"schedule.warmup_steps={text}")
    assert run.code == 0, run.error
    assert f"schedule.warmup_steps: {text} = {steps} steps" in run.output


def test_a_run_warms_up_for_as_many_steps(train: Any) -> None:
    words = ("recipe=digits", "steps=4", "log_every=1", "cluster.processes=1", "lr=0.3", "batch_size=479")
    run = train(*words, "schedule.warmup_steps=1 epoch")
    assert run.code == 0, run.error
    assert [line["lr"] for line in run.steps()][:3] == pytest.approx([0.1, 0.2, 0.3])


def test_tokens_of_a_recipe_that_counts_none_are_refused_in_a_sentence(train: Any) -> None:
    run = train("recipe=digits", "schedule.warmup_steps=10M tokens")
    assert (run.code, run.folder) == (2, None)
    assert "Implement Recipe.tokens_per_sample" in run.error
